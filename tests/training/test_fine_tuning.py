"""Fine-tuning: runs that start from the weights of a run, a model file or an exported folder."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import tiny_run
from test_evaluate import train_on_books, write_books

from transformer_vq import TransformerVQ
from transformer_vq.data.prepare import prepare
from transformer_vq.errors import UserError
from transformer_vq.training.checkpoint import (
    MODEL,
    CheckpointError,
    load_model,
    newest_checkpoint,
    read_config,
)
from transformer_vq.training.loading import InitialModel
from transformer_vq.training.run import resume, train


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A finished run on bytes, which no test changes."""
    folder = tmp_path_factory.mktemp("source")
    train(tiny_run(folder, train={"steps": 4}), folder / "source")
    return folder / "source"


def fine_tuning(source, path=None, **changes):
    """The config of a run of one step that starts from `path`, by default from the source."""
    config = read_config(source)
    config = replace(config, model=replace(config.model, **changes.get("model", {})))
    config = replace(config, data=replace(config.data, **changes.get("data", {})))
    train_changes = {"steps": 1, "init_from": str(path or source)} | changes.get("train", {})
    return replace(config, train=replace(config.train, **train_changes))


def initial_model(config):
    model = TransformerVQ(config.model)
    model.load_state_dict(dict(InitialModel(config.train.init_from).weights(config.model)))
    return model


def export(run, folder, **options):
    """Export a run; the options are those of `transformer_vq.hf.export.export`."""
    pytest.importorskip("transformers")
    from transformer_vq.hf.export import export

    export(run, folder, **options)
    return folder


def saved_by_transformers(folder, out, change=lambda model: None, **options):
    """Load an exported folder with transformers, change the model, and save it."""
    from transformers import AutoTokenizer

    from transformer_vq.hf import TransformerVQForCausalLM

    model = TransformerVQForCausalLM.from_pretrained(folder)
    change(model)
    model.save_pretrained(out, **options)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return model


def assert_same_weights(model, other):
    want = other.state_dict()
    assert model.state_dict().keys() == want.keys()
    assert [n for n, x in model.state_dict().items() if not x.equal(want[n])] == []


def test_a_run_starts_from_a_run_or_a_model_file(source, tmp_path):
    best = load_model(source)[0]
    for path in (source, source / "best" / MODEL, str(source / "best" / MODEL)):
        assert InitialModel(path).config == best.config
        assert_same_weights(initial_model(fine_tuning(source, path)), best)
    train(fine_tuning(source), tmp_path / "tuned")  # the learning rate of step 1 is 0
    tuned = newest_checkpoint(tmp_path / "tuned").model
    assert torch.allclose(tuned.embed.weight, best.embed.weight, rtol=2e-3)
    assert read_config(tmp_path / "tuned").train.init_from == str(source)


def test_a_run_starts_from_an_exported_folder(source, tmp_path):
    folder = export(source, tmp_path / "exported")
    best = load_model(source)[0]
    assert InitialModel(folder).config == best.config
    config = fine_tuning(source, folder)
    assert_same_weights(initial_model(config), best)
    assert train(config, tmp_path / "tuned").finished

    weights = folder / MODEL
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    with pytest.raises(CheckpointError, match=r"export the model again"):
        initial_model(config)


@pytest.mark.parametrize("n_files", [1, 2])
def test_a_run_starts_from_a_tied_model_that_transformers_saved(tmp_path, n_files):
    tied = {"tie_embeddings": True, "final_norm": True}
    train(tiny_run(tmp_path, model=tied, train={"steps": 2}), tmp_path / "source")
    folder = export(tmp_path / "source", tmp_path / "exported")

    def change(model):
        with torch.no_grad():
            model.model.embed.weight.add_(1)

    sharded = {"max_shard_size": "12KB"} if n_files > 1 else {}
    tuned = saved_by_transformers(folder, tmp_path / "saved", change, **sharded)
    assert (tmp_path / "saved" / f"{MODEL}.index.json").exists() == (n_files > 1)
    config = fine_tuning(tmp_path / "source", tmp_path / "saved")
    model = initial_model(config)
    assert torch.equal(model.embed.weight, tuned.model.embed.weight.float())
    assert train(config, tmp_path / "tuned").finished


def test_tokens_that_were_added_with_transformers_are_kept(tmp_path):
    from transformers import AutoTokenizer

    config = tiny_run(tmp_path, model={"vocab_size": 280}, train={"steps": 1})
    config = replace(config, data=replace(config.data, tokenizer="bpe"))
    train(config, tmp_path / "source")
    n_tokens = load_model(tmp_path / "source")[0].config.vocab_size
    folder = export(tmp_path / "source", tmp_path / "exported")
    saved_by_transformers(
        folder,
        tmp_path / "saved",
        lambda model: model.resize_token_embeddings(n_tokens + 1, mean_resizing=False),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "saved")
    model = InitialModel(tmp_path / "saved").config
    assert model.vocab_size == n_tokens + 1
    data = {"tokenizer": None}
    tuning = fine_tuning(
        tmp_path / "source", tmp_path / "saved", model={"vocab_size": n_tokens + 1}, data=data
    )
    assert train(tuning, tmp_path / "tuned").finished
    assert load_model(tmp_path / "tuned")[0].config.vocab_size == n_tokens + 1


def test_models_with_another_head_are_rejected(source, tmp_path):
    folder = export(source, tmp_path / "exported")
    from transformer_vq.hf import TransformerVQModel

    TransformerVQModel.from_pretrained(folder).save_pretrained(tmp_path / "features")
    with pytest.raises(CheckpointError, match="is a TransformerVQModel"):
        initial_model(fine_tuning(source, tmp_path / "features"))


def test_settings_that_only_affect_training_may_differ(source):
    changes = {"p_dropsin": 0.3, "p_dropres": 0.2, "p_droplyr": 0.1, "commit_coef": 1.0}
    changes |= {"ema_decay": 0.5, "revive_below": 0.0, "codebook_init": "keys"}
    changes |= {"grad_through_cache": False}
    config = fine_tuning(source, model=changes)
    model = initial_model(config)
    assert model.config == config.model
    assert_same_weights(model, load_model(source)[0])
    assert model.branches[0].quantizer.ema_decay == 0.5
    assert bool(model.branches[0].quantizer.started)


@pytest.mark.parametrize("change", [{"n_code": 9}, {"logit_scale": 2.0}])
def test_another_architecture_is_rejected_before_anything_is_written(source, tmp_path, change):
    (name,) = change
    with pytest.raises(CheckpointError, match=rf"init-from .*its model differs in model\.{name} "):
        train(fine_tuning(source, model=change), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(("ends", "option"), [(True, "--data.end-of"), (False, "--data.no-end-of")])
def test_another_end_of_document_is_rejected_with_the_option_that_fixes_it(tmp_path, ends, option):
    base = tiny_run(tmp_path, train={"steps": 1})
    train(replace(base, data=replace(base.data, end_of_document=ends)), tmp_path / "source")
    assert InitialModel(tmp_path / "source").config.vocab_size == (257 if ends else 256)
    other = fine_tuning(tmp_path / "source", data={"end_of_document": not ends})
    with pytest.raises(CheckpointError, match=rf"25[67] tokens \(bytes\).*25[67].*use {option}"):
        train(other, tmp_path / "tuned")


def test_the_tokenizer_of_the_source_is_used_by_default(tmp_path):
    source = train_on_books(tmp_path)
    config = fine_tuning(source)
    text = replace(config.data, dataset="text", path=str(tmp_path / "train"), tokenizer=None)
    train(replace(config, data=text), tmp_path / "tuned")
    vocabularies = [run / "tokenizer.json" for run in (source, tmp_path / "tuned")]
    assert vocabularies[0].read_bytes() == vocabularies[1].read_bytes()
    assert read_config(tmp_path / "tuned").data.tokenizer == str(vocabularies[0])
    with pytest.raises(CheckpointError, match=r"270 tokens \(tokenizer .*leave out --data.token"):
        train(replace(config, data=replace(text, tokenizer="bytes")), tmp_path / "other")


def test_resume_rejects_another_tokenizer(tmp_path):
    run = train_on_books(tmp_path)
    config = read_config(run)
    write_books(tmp_path / "other", ["Other words,", "and a longer sentence of them."])
    other = prepare(replace(config.data, path=str(tmp_path / "other")), 270)
    given = replace(config.data, tokenizer=str(tmp_path / "my.json"))
    (tmp_path / "my.json").write_bytes((run / "tokenizer.json").read_bytes())
    train(replace(config, data=given), tmp_path / "tuned")
    (tmp_path / "my.json").write_bytes((other.folder / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="tokenizer of the data is not that of"):
        resume(tmp_path / "tuned")


def test_paths_that_are_not_models_are_rejected(tmp_path):
    (tmp_path / "file.safetensors").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for name, reason in {
        "missing": "does not contain a model",
        "empty": "does not contain a model",
        "file.safetensors": "is not a readable safetensors file",
        "other": "is a model of type gpt2",
    }.items():
        with pytest.raises(UserError, match=rf"{name} {reason}"):
            InitialModel(tmp_path / name)
