"""Export of a run to a folder that transformers can load; failures leave no files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece_models import train_sentencepiece
from servers import TOKENIZER, a_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformer_vq import UserError
from transformer_vq.cli.main import main
from transformer_vq.config import DataConfig
from transformer_vq.data.bpe import learn_bpe
from transformer_vq.data.tokenizers import TOKENIZER_FILES, SentencePieceTokenizer, load_tokenizer
from transformer_vq.generation.decode import generate
from transformer_vq.hf import TransformerVQForCausalLM
from transformer_vq.hf.export import export
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.training.checkpoint import CheckpointError, load_model, read_tokenizer
from transformer_vq.training.loading import load_model_and_tokenizer

FILES = {
    *("README.md", "manifest.json", "config.json", "generation_config.json"),
    *("model.safetensors", "tokenizer_config.json", "transformer_vq_classes.py"),
}
LINES = "".join(f"In {1800 + i} the fox saw {i} dogs.\n" for i in range(200))
TOKENS = torch.tensor([[256, *b"the cat sat on the mat"]])
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def run(tmp_path):
    """Return a run on bytes and ends of documents."""
    return a_run(tmp_path / "run", tokenizer=TOKENIZER)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "bpe"])
def test_exported_model_generates_the_same_tokens_as_the_run(kind, tmp_path, out):
    tokenizer = TOKENIZER
    if kind == "bpe":
        learn_bpe([LINES], 300, tmp_path)
        tokenizer = load_tokenizer(tmp_path, end_of_document=True)
    elif kind == "sentencepiece":
        train_sentencepiece([LINES], 300, tmp_path / "my.model")
        tokenizer = SentencePieceTokenizer(tmp_path / "my.model", end_of_document=True)
    run = a_run(tmp_path / "run", tokenizer=tokenizer)
    out.mkdir()  # an existing empty folder is allowed
    assert export(run, out) == "best"
    ours, tokenizer = load_model(run)[0], read_tokenizer(run)
    model = AutoModelForCausalLM.from_pretrained(out)
    theirs = AutoTokenizer.from_pretrained(out)
    extra = {name for name in TOKENIZER_FILES if (run / name).exists()}
    assert {path.name for path in out.iterdir()} == FILES | extra
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


def test_export_does_not_overwrite_files(run, out):
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="out is not empty"):
        export(run, out)
    with pytest.raises(CheckpointError, match="mine is not empty"):
        export(run, out / "mine")
    assert [path.name for path in out.rglob("*")] == ["mine"]


def test_failed_export_leaves_no_files(run, tmp_path, out, monkeypatch):
    monkeypatch.setattr(TransformerVQForCausalLM, "save_pretrained", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, out)
    with pytest.raises(CheckpointError, match="no checkpoint '7'"):
        export(run, out, "7")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        export(tmp_path, out)
    assert list(tmp_path.iterdir()) == [run]


def test_export_of_an_image_run_has_no_tokenizer(tmp_path, out):
    export(a_run(tmp_path / "run", DataConfig("images")), out)
    assert {path.name for path in out.iterdir()} == FILES - {"tokenizer_config.json"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_loaded_in_the_exported_dtype_and_codebooks_in_float32(run, out, dtype):
    export(run, out, dtype=dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    wanted = load_model(run)[0].state_dict()
    for name, x in model.to_core().state_dict().items():
        assert torch.equal(x, wanted[name].to(x.dtype)), name
    assert {x.dtype for x in model.buffers() if x.is_floating_point()} == {torch.float32}
    assert model.generate(TOKENS, max_new_tokens=3).shape[1] <= TOKENS.shape[1] + 3


def test_changed_weights_are_an_error_and_an_edited_config_is_a_warning(run, out, capsys):
    export(run, out)
    path = out / "config.json"
    path.write_text(path.read_text() + " ")
    AutoModelForCausalLM.from_pretrained(out)
    assert "config.json was edited" in capsys.readouterr().err
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt.*export the model again"):
        AutoModelForCausalLM.from_pretrained(out)


def test_weights_that_are_not_finite_are_reported(run, out):
    export(run, out)
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.bias"][3] = torch.nan
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "manifest.json").unlink()
    for load in (AutoModelForCausalLM.from_pretrained, load_model_and_tokenizer):
        with pytest.raises(NotFiniteError, match=r"out: (lm_)?head\.bias contains NaN"):
            load(out)


def test_a_model_saved_over_an_export_or_in_shards_is_loaded(run, tmp_path, out):
    export(run, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.nn.init.ones_(model.lm_head.bias)
    model.save_pretrained(out)
    assert not (out / "manifest.json").exists()
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for folder in (out, tmp_path / "shards"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_chat_template_is_applied_by_the_loaded_tokenizer(run, tmp_path, out):
    (tmp_path / "my.jinja").write_text(TEMPLATE)
    main(["export", str(run), str(out), "--chat-template", str(tmp_path / "my.jinja")])
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "user: hi\nassistant: ho\n"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == text
    assert tokenizer.apply_chat_template(MESSAGES)["input_ids"] == list(text.encode())
    assert tokenizer("<|endoftext|>")["input_ids"] == [256, *b"<|endoftext|>"]
    tokenizer.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == TEMPLATE


def test_chat_template_of_the_run_is_used_and_writes_special_tokens(run, out):
    (run / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    export(run, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template(MESSAGES)["input_ids"] == [*b"hi", 256]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n{% for x in %}", "my.jinja, line 2"),
        (b"\xff", "my.jinja: 'utf-8' codec can't decode"),
        (None, "my.jinja: No such file"),
        (b" \n", "my.jinja is empty"),
        ("/dev/full", "my.jinja: not a file"),
        ("/", "my.jinja: not a file"),
    ],
)
def test_invalid_chat_templates_are_rejected(run, tmp_path, out, content, message):
    if isinstance(content, str):
        (tmp_path / "my.jinja").symlink_to(content)
    elif content is not None:
        (tmp_path / "my.jinja").write_bytes(content)
    with pytest.raises(UserError) as error:
        export(run, out, chat_template=tmp_path / "my.jinja")
    assert message in str(error.value)
    assert not out.exists()
