"""Converted models are runs: loaded, sampled, evaluated and exported like any other."""

import json

import pytest
import torch
import transformers
from pretrained_models import random_model, write_gguf, write_tokenizer

from transformer_vq import UserError, convert, evaluate, load_run
from transformer_vq.cli.main import main
from transformer_vq.config import DataConfig
from transformer_vq.conversion.sources import open_source
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.text import sample_text
from transformer_vq.training.loading import (
    load_model_and_tokenizer,
    read_chat_template,
    read_sampling,
)

CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "cat-model"
    random_model("Qwen2", tie_word_embeddings=True).save_pretrained(folder)
    write_tokenizer(folder)
    values = {"temperature": 0.3, "top_p": 0.8, "top_k": 5, "eos_token_id": [2, 0]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("Apache")
    return folder


@pytest.fixture
def run(source, tmp_path):
    return convert(source, tmp_path / "run", attention="full")


def run_command(*arguments):
    try:
        main([str(x) for x in arguments])
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_run_has_tokenizer_template_settings_and_license(run, source):
    model, tokenizer, _ = load_run(run)
    assert tokenizer.vocab_size == model.config.vocab_size == 300  # of which 290 have a text
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    text = "then the cat  sat\n\n12 <mat>"
    assert tokenizer.encode(text) == theirs(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)).decode() == text
    assert tokenizer.decode([299, 2]) == b""
    assert (tokenizer.bos, tokenizer.eod) == (0, 0)
    assert set(tokenizer.stops) == {0, 2}
    assert read_chat_template(run) == "{{ messages[0].content }}"
    sampling = read_sampling(run)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.8, 5)
    assert (run / "LICENSE").read_text() == "Apache"
    assert json.loads((run / "about.json").read_text())["license"] == "apache-2.0"


def test_generation_ends_at_the_end_of_a_message(run, capsys):
    model, tokenizer, _ = load_run(run)
    context = prefill(model, [[0, 5]])
    context.logits[:, 2] = 1e9
    assert sample_text(model, tokenizer, context, 5, Sampling())[0].ended
    assert run_command("sample", run, "--prompt", "the cat", "--tokens", 4, "--seed", 1) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_run_is_evaluated_on_given_texts_only_and_not_resumed(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 30)
    data = DataConfig(path=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache"))
    result = evaluate(run, data=data)
    assert result.split == "all"
    assert run_command("eval", run) == 2
    assert run_command("resume", run) == 2
    assert "fine-tune it with" in capsys.readouterr().err
    assert (run / "best" / "model.safetensors").is_file()


def test_export_states_base_model_license_and_stops(run, tmp_path):
    out = tmp_path / "export"
    assert run_command("export", run, out) == 0
    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "base_model: cat-model" in card
    assert "| converted from | `cat-model` |" in card
    assert "standard library" not in card
    settings = json.loads((out / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["temperature"]) == ([0, 2], 0.3)
    assert (out / "LICENSE").is_file()
    model, tokenizer = load_model_and_tokenizer(out)
    assert tokenizer.vocab_size == model.config.vocab_size
    assert set(tokenizer.stops) == {0, 2}


def test_gguf_brings_tokenizer_and_license(tmp_path):
    pytest.importorskip("gguf")
    write_tokenizer(tmp_path, vocab_size=300)
    model = random_model(hidden_size=64)
    write_gguf(tmp_path / "cat.gguf", model, tmp_path)
    run = convert(tmp_path / "cat.gguf", tmp_path / "run", attention="full")
    _, tokenizer, _ = load_run(run)
    text = "the cat  sat on 1234"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(text) == theirs(text).input_ids
    assert (tokenizer.bos, tokenizer.eod, tokenizer.stops) == (0, 0, (2,))
    assert read_chat_template(run) == "{{ messages[0].content }}"
    assert json.loads((run / "about.json").read_text())["license"] == "apache-2.0"


def test_bos_is_kept_if_the_tokenizer_adds_it(source, tmp_path):
    write_tokenizer(source, bos_token="<|im_start|>", add_bos_token=True)
    _, tokenizer, _ = load_run(convert(source, tmp_path / "run", attention="full"))
    assert (tokenizer.bos, tokenizer.eod) == (1, 0)


def test_tokenizer_that_does_not_fit_is_rejected(source, tmp_path):
    write_tokenizer(source, vocab_size=310)
    with pytest.raises(UserError, match="the tokenizer has 310 tokens, the model 300"):
        convert(source, tmp_path / "run", attention="full")
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="the tokenizer of cat-model is invalid"):
        convert(source, tmp_path / "run", attention="full")
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        convert(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_model_without_tokenizer_is_converted_with_a_warning(source, tmp_path, capsys):
    (source / "tokenizer.json").unlink()
    run = convert(source, tmp_path / "run", attention="full")
    assert "has no tokenizer; the run has weights only" in capsys.readouterr().err
    assert (run / "best" / "model.safetensors").is_file()


def test_nothing_is_overwritten_or_left_behind(source, tmp_path, monkeypatch):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert run_command("convert", source, "--out", out) == 2
    assert [x.name for x in out.iterdir()] == ["notes.txt"]

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_vq.conversion.convert.write_config", interrupted)
    before = set(tmp_path.iterdir())
    command = ("convert", source, "--out", tmp_path / "new", "--attention", "full")
    assert run_command(*command) == 130
    assert set(tmp_path.iterdir()) == before


def test_hub_names_and_licenses_are_recognized(source):
    assert open_source(source).license == "apache-2.0"
    (source / "README.md").write_text("no header\nlicense: mit\n")
    assert open_source(source).license is None


def test_calibrated_run_is_decoded_evaluated_and_described(source, tmp_path, capsys):
    text = tmp_path / "private" / "cats.txt"
    text.parent.mkdir()
    text.write_text("the cat sat on the mat, then that cat ran after another hat.\n" * 300)
    sizes = ("--block-len", 16, "--n-code", 8, "--n-sink", 2, "--n-exact", 4, "--tokens", 500)
    command = ("convert", source, "--out", tmp_path / "run", "--data.path", text, *sizes)
    assert run_command(*command) == 0
    model, tokenizer, _ = load_run(tmp_path / "run")
    tokens = torch.tensor([tokenizer.encode("the cat sat on another mat, ran " * 12)])
    first = model(tokens[:, :50])
    second = model(tokens[:, 50:], first.state)
    whole = model(tokens).logits
    torch.testing.assert_close(second.logits, whole[:, 50:], rtol=1e-3, atol=1e-3)
    assert run_command("sample", tmp_path / "run", "--prompt", "the cat " * 30, "--tokens", 40) == 0
    about = (tmp_path / "run" / "about.json").read_text()
    assert "cats.txt" in about
    assert "private" not in about
    assert run_command("export", tmp_path / "run", tmp_path / "export") == 0
    assert "tokens of cats.txt |" in (tmp_path / "export" / "README.md").read_text()


def test_fine_tuned_run_keeps_license_and_settings(run, tmp_path):
    (tmp_path / "cats.txt").write_text("the cat sat on the mat, then that cat ran.\n" * 300)
    sizes = ("--train.seq-len", 16, "--train.backprop-len", 16, "--train.eval-tokens", 20)
    command = ("train", run, "--train.init-from", run, "--data.path", tmp_path / "cats.txt")
    options = ("--train.steps", 2, "--train.batch-size", 1, "--optim.warmup", 0)
    cache = ("--data.cache", tmp_path / "cache", "--out", tmp_path / "tuned")
    assert run_command(*command, *sizes, *options, *cache) == 0
    _, tokenizer, _ = load_run(tmp_path / "tuned")
    assert set(tokenizer.stops) == {0, 2}
    assert read_sampling(tmp_path / "tuned").top_k == 5
    assert run_command("export", tmp_path / "tuned", tmp_path / "export") == 0
    card = (tmp_path / "export" / "README.md").read_text()
    assert "| converted from | `cat-model` |" in card
    assert "license: apache-2.0" in card
    assert "| optimizer |" in card
