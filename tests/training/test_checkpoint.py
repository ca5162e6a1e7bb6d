"""Run folders: their config, and loading a trained model with its tokenizer."""

import pytest
from helpers import interrupted, tiny_run
from test_evaluate import train_on_books

from transformer_vq import TransformerVQ, generate, load_run
from transformer_vq.data.tokenizers import JSON_FILE
from transformer_vq.errors import UserError
from transformer_vq.files import read_object, write_json
from transformer_vq.training.checkpoint import CheckpointError, load_model
from transformer_vq.training.run import read_history, resume, train


def edit_config(run, section, **changes):
    values = read_object(run / "config.json")
    values[section] |= changes
    write_json(run / "config.json", values)


def test_an_edited_config_is_reported_and_used_where_possible(tmp_path, capsys):
    run, want = tmp_path / "run", tmp_path / "want"
    interrupted(5, train, tiny_run(tmp_path), run)
    train(tiny_run(tmp_path), want)
    edit_config(run, "train", log_every=5)
    load_run(run, "last")
    assert "config.json was edited: train.log_every (1 -> 5)" in capsys.readouterr().err
    assert resume(run).finished
    assert "config.json was edited: train.log_every (1 -> 5)" in capsys.readouterr().err
    assert read_history(run)[2]["changed"] == {"train.log_every": [1, 5]}
    assert load_run(run, "last").model.embed.weight.equal(load_run(want, "last").model.embed.weight)
    assert "edited" not in capsys.readouterr().err
    edit_config(run, "train", steps=20)
    with pytest.raises(CheckpointError, match="cosine schedule"):
        resume(run)
    edit_config(run, "train", steps=10)
    edit_config(run, "model", n_code=8)
    for load in (load_run, lambda run: load_run(run, "last"), resume):
        with pytest.raises(CheckpointError, match=r"model\.n_code"):
            load(run)
    edit_config(run, "model", n_code="many")
    with pytest.raises(CheckpointError, match=r"config\.json: .*n_code.*; undo the edit"):
        load_run(run)


def test_runs_of_another_version_give_one_line(tmp_path):
    write_json(tmp_path / "config.json", tiny_run(tmp_path).to_dict() | {"format": 2})
    with pytest.raises(CheckpointError, match=r"another version.*format 2.*; train it again"):
        load_run(tmp_path)


def test_load_run_returns_a_model_that_generates_text(tmp_path):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "run")
    model, tokenizer, loaded_config = load_run(str(tmp_path / "run"))
    assert loaded_config == config
    assert not model.training
    want = load_model(tmp_path / "run", "best")[0].state_dict()
    assert all(x.equal(want[name]) for name, x in model.state_dict().items())

    prompt = tokenizer.encode("the cat ")
    tokens = generate(model, prompt, max_new_tokens=5, seed=0)
    assert len(tokens) == 5
    assert tokenizer.decode(prompt + tokens).startswith(b"the cat ")
    assert tokens == generate(model, prompt, max_new_tokens=5, seed=0)


def test_load_run_returns_the_learned_tokenizer(tmp_path):
    run = train_on_books(tmp_path)
    _, tokenizer, config = load_run(run)
    text = "It was the best of times, it was the worst of times.\n"
    tokens = tokenizer.encode(text)
    assert len(tokens) < len(text) / 2
    assert max(tokens) < tokenizer.vocab_size == config.model.vocab_size
    assert tokenizer.decode(tokens) == text.encode()

    vocabulary = run / JSON_FILE
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1])
    with pytest.raises(UserError, match="corrupt"):
        load_run(run)


def test_loading_a_run_folder_as_a_model_names_load_run(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 1}), tmp_path / "run")
    with pytest.raises(UserError, match=r"run is a run folder.*load_run"):
        TransformerVQ.load(tmp_path / "run")


@pytest.mark.parametrize("name", ["nothing", "file", "empty", "broken"])
def test_load_run_rejects_a_path_that_is_not_a_run_folder(tmp_path, name):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(UserError, match=f"/{name}"):
        load_run(tmp_path / name)


def test_load_run_uses_the_last_checkpoint_before_the_first_validation(tmp_path):
    config = tiny_run(tmp_path, train={"eval_every": 10})
    interrupted(1, train, config, tmp_path / "run")
    loaded = load_run(tmp_path / "run").model
    model, name = load_model(tmp_path / "run", "last")
    assert name == "step 2"
    assert loaded.embed.weight.equal(model.embed.weight)
