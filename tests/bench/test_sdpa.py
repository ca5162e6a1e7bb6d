"""The SDPA baseline: its attention, its parameters and its FLOPs."""

import torch
from helpers import assert_close, tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from steps import SdpaAttention, SdpaTransformer, sdpa_flops_per_token
from transformer_vq import TransformerVQ
from transformer_vq.nn.layers import rms_norm


def test_sdpa_baseline_is_causal_softmax_attention():
    layer = SdpaAttention(16, 8).double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    q, k, v = layer.qkv_proj(rms_norm(x)).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
    is_future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 8**-0.5).masked_fill(is_future, -torch.inf).softmax(-1)
    want = layer.o_proj((weights @ v).transpose(1, 2).reshape(2, 11, 16))
    assert_close("output", layer(x), want)


def test_sdpa_baseline_has_the_parameters_of_mha_without_positions():
    config = tiny_config(head_type="mha", attention="full")
    full, plain = TransformerVQ(config), SdpaTransformer(config)
    positional = sum(
        p.numel()
        for name, p in full.named_parameters()
        if name.split(".")[2:3] in (["u"], ["v"]) or "r_proj" in name
    )
    count = [sum(p.numel() for p in model.parameters()) for model in (full, plain)]
    assert count[0] - positional == count[1]


def test_flops_of_the_sdpa_baseline_equal_the_counted_flops():
    config = tiny_config(head_type="shga")
    model, tokens = SdpaTransformer(config), torch.zeros(3, 24, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    # All 24 keys are scored, even masked ones: the average of a causal sequence of 48.
    assert counter.get_total_flops() == tokens.numel() * sdpa_flops_per_token(config, 48)
