"""Sources: every supported family equals transformers; everything else is one clear line."""

import pytest
import torch
import transformers
from pretrained_models import random_model, write_gguf, write_tokenizer

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
