"""Export of a run to a folder that transformers can load; failures leave no files."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_run
from sentencepiece_models import train_sentencepiece
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformer_vq.config import DataConfig
from transformer_vq.data.tokenizers import TOKENIZER_FILES
from transformer_vq.generation.decode import generate
from transformer_vq.hf import TransformerVQForCausalLM
from transformer_vq.hf.export import export
from transformer_vq.training.checkpoint import CheckpointError, load_model, read_tokenizer
from transformer_vq.training.run import train

FILES = {
    *("README.md", "manifest.json", "config.json", "generation_config.json"),
    *("model.safetensors", "tokenizer_config.json", "transformer_vq_classes.py"),
}


def books(folder):
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True)
        lines = (f"In {1800 + i} the {split} fox saw {i} dogs.\n" for i in range(60))
        (folder / split / "1.txt").write_text("".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run trained on bytes."""
    return trained(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "bpe"])
def run_with_tokenizer(request, tmp_path_factory):
    """Return a run for each tokenizer type."""
    if request.param == "bytes":
        return request.getfixturevalue("run")
    return trained(tmp_path_factory.mktemp(request.param), request.param)


def trained(folder, tokenizer="bytes"):
    config = tiny_run(folder, train={"steps": 4})
    if tokenizer in ("sentencepiece", "bpe"):
        path = books(folder / "books")
        texts = [file.read_text() for file in (folder / "books" / "train").iterdir()]
        train_sentencepiece(texts, 300, folder / "my.model")
        config = replace(
            config,
            model=replace(config.model, vocab_size=300),
            data=DataConfig(
                "pg19",
                path=path,
                tokenizer=str(folder / "my.model") if tokenizer == "sentencepiece" else "bpe",
                cache=str(folder / "cache"),
            ),
        )
    train(config, folder / "run")
    return folder / "run"


def test_exported_model_generates_the_same_tokens_as_the_run(run_with_tokenizer, tmp_path):
    run = run_with_tokenizer
    assert export(run, tmp_path / "out") == "best"
    ours, tokenizer = load_model(run)[0], read_tokenizer(run)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    extra = {name for name in TOKENIZER_FILES if (run / name).exists()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES | extra
    text = "In 1805 the caf\u00e9 fox"
    inputs = theirs(text, return_tensors="pt")
    tokens = [tokenizer.bos, *tokenizer.encode(text)]
    assert inputs.input_ids.tolist() == [tokens]
    assert torch.equal(model(**inputs).logits, ours.eval()(torch.tensor([tokens])).logits)
    got = model.generate(**inputs, max_new_tokens=10)[0, len(tokens) :].tolist()
    want = generate(ours, tokens, 10, temperature=0)
    if tokenizer.eod in want:
        want = want[: want.index(tokenizer.eod) + 1]
    assert got == want
    for settings in (model.config, model.generation_config, theirs):
        assert settings.bos_token_id == tokenizer.bos
        assert settings.eos_token_id == tokenizer.eod
        assert settings.pad_token_id == tokenizer.bos


def test_export_writes_the_requested_checkpoint(run, tmp_path):
    (tmp_path / "out").mkdir()  # an existing empty folder is allowed
    assert export(run, tmp_path / "out", "3") == "step 3"
    model = TransformerVQForCausalLM.from_pretrained(tmp_path / "out")
    for name, want in load_model(run, "3")[0].state_dict().items():
        assert torch.equal(model.to_core().state_dict()[name], want), name


def test_export_does_not_overwrite_files(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="out is not empty"):
        export(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="mine is not empty"):
        export(run, tmp_path / "out" / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_failed_export_leaves_no_files(run, tmp_path, monkeypatch):
    monkeypatch.setattr(TransformerVQForCausalLM, "save_pretrained", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no checkpoint '7'"):
        export(run, tmp_path / "out", "7")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        export(tmp_path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_export_of_an_image_run_has_no_tokenizer(run, tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    for module in ("export", "model_card"):
        monkeypatch.setattr(
            f"transformer_vq.hf.{module}.read_config",
            lambda run: replace(config, data=DataConfig("images")),
        )
    export(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"tokenizer_config.json"}
