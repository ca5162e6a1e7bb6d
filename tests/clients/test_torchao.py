"""torchao: int8 weights are used by the forward pass, by decoding and by the core's generation."""

import pytest
import torch
from client_models import decoded_logits, logits_of, make_model, tokens
from helpers import assert_close, relative_rms
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.utils import TorchAOBaseTensor
from transformers import TorchAoConfig

from transformer_vq import generate
from transformer_vq.hf import TransformerVQForCausalLM


@pytest.mark.parametrize("head_type", ["shga", "gqa"])
def test_int8_weights_are_used_and_close_to_float32(head_type):
    model = make_model(head_type=head_type)
    batch = tokens(2, 14)
    want = logits_of(model, batch)
    quantize_(model, Int8WeightOnlyConfig(version=2))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(module.weight, TorchAOBaseTensor) for module in linear)
    got = logits_of(model, batch)
    assert 0 < relative_rms(got, want) < 0.1
    assert_close("decoded", decoded_logits(model, batch), got)
    sequences = model.generate(input_ids=batch[:1], max_new_tokens=8, do_sample=False)
    new_tokens = generate(model.to_core(), batch[0].tolist(), 8, temperature=0)
    assert new_tokens == sequences[0, 14:].tolist()


def test_model_quantized_on_loading_is_saved_and_restored_exactly(tmp_path):
    model, batch = make_model(), tokens(2, 14)
    model.save_pretrained(tmp_path / "float32")
    quantized = TransformerVQForCausalLM.from_pretrained(
        tmp_path / "float32",
        quantization_config=TorchAoConfig(Int8WeightOnlyConfig(version=2)),
    )
    assert isinstance(quantized.model.branches[0].r_proj.weight, TorchAOBaseTensor)
    got = logits_of(quantized, batch)
    assert 0 < relative_rms(got, logits_of(model, batch)) < 0.1
    quantized.save_pretrained(tmp_path / "int8")
    restored = TransformerVQForCausalLM.from_pretrained(tmp_path / "int8")
    assert torch.equal(logits_of(restored, batch), got)
