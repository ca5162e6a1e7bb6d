"""Options of an export: dtype and chat template; and what is verified when a folder is loaded."""

import json

import pytest
import torch
from helpers import tiny_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformer_vq import TransformerVQ
from transformer_vq.cli.main import main
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.errors import UserError
from transformer_vq.hf import TransformerVQForCausalLM
from transformer_vq.hf.export import export
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.training.checkpoint import write_config
from transformer_vq.training.loading import load_model_and_tokenizer

TOKENS = torch.tensor([[256, *b"the cat sat on the mat"]])
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a byte-level run with random weights."""
    folder = tmp_path_factory.mktemp("options")
    config = tiny_run(folder)
    (folder / "run" / "best").mkdir(parents=True)
    write_config(folder / "run", config, ByteTokenizer(True))
    torch.manual_seed(0)
    TransformerVQ(config.model).save(folder / "run" / "best" / "model.safetensors")
    return folder / "run"


def core(run):
    return TransformerVQ.load(run / "best" / "model.safetensors").eval()


def user_error(capsys, *arguments):
    """Return the single error line of a command that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_loaded_in_the_exported_dtype_and_codebooks_in_float32(run, tmp_path, dtype):
    export(run, tmp_path / "out", dtype=dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    wanted = core(run).state_dict()
    for name, buffer in model.to_core().named_buffers():
        assert torch.equal(buffer, wanted[name]), name
    for name, parameter in model.to_core().named_parameters():
        assert torch.equal(parameter, wanted[name].to(parameter.dtype)), name
    assert model.generate(TOKENS, max_new_tokens=3).shape[1] <= TOKENS.shape[1] + 3


def test_shards_are_loaded(run, tmp_path):
    TransformerVQForCausalLM.from_core(core(run)).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model(TOKENS).logits, core(run)(TOKENS).logits)


def test_changed_weights_are_an_error_and_an_edited_config_is_a_warning(run, tmp_path, capsys):
    export(run, folder := tmp_path / "out")
    path = folder / "config.json"
    path.write_text(path.read_text() + " ")
    AutoModelForCausalLM.from_pretrained(folder)
    assert "config.json was edited" in capsys.readouterr().err
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt.*export the model again"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_weights_that_are_not_finite_are_reported(run, tmp_path):
    export(run, folder := tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()
    for load in (AutoModelForCausalLM.from_pretrained, load_model_and_tokenizer):
        with pytest.raises(NotFiniteError, match=r"out: (lm_)?head\.bias contains NaN"):
            load(folder)


def test_a_model_saved_over_an_export_is_loaded(run, tmp_path):
    export(run, folder := tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.ones_(model.lm_head.bias)
    model.save_pretrained(folder)
    assert not (folder / "manifest.json").exists()
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(folder).lm_head.bias, model.lm_head.bias
    )


def test_chat_template_is_applied_by_the_loaded_tokenizer(run, tmp_path):
    (tmp_path / "my.jinja").write_text(TEMPLATE)
    main(["export", str(run), str(tmp_path / "out"), "--chat-template", str(tmp_path / "my.jinja")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "user: hi\nassistant: ho\n"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == text
    assert tokenizer.apply_chat_template(MESSAGES)["input_ids"] == list(text.encode())
    assert tokenizer("<|endoftext|>")["input_ids"] == [256, *b"<|endoftext|>"]
    tokenizer.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == TEMPLATE


def test_chat_template_of_the_run_is_used_and_writes_special_tokens(run, tmp_path):
    (run / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    try:
        export(run, tmp_path / "out")
    finally:
        (run / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
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
def test_invalid_chat_templates_are_rejected(run, tmp_path, capsys, content, message):
    if isinstance(content, str):
        (tmp_path / "my.jinja").symlink_to(content)
    elif content is not None:
        (tmp_path / "my.jinja").write_bytes(content)
    out = tmp_path / "out"
    line = user_error(capsys, "export", run, out, "--chat-template", tmp_path / "my.jinja")
    assert message in line
    assert not out.exists()
