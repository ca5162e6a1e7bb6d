"""Floating-point operations of a training step, counted by PyTorch."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from transformer_vq import TransformerVQ


def _flops_of_baddbmm(total, a, b, *_, **__):
    return 2 * math.prod(a) * b[-1]


def training_flops(model: TransformerVQ, seq_len: int) -> int:
    """Return the FLOPs of a forward and backward pass over one sequence."""
    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    uncounted_by_torch = {torch.ops.aten.baddbmm_: _flops_of_baddbmm}
    with FlopCounterMode(display=False, custom_mapping=uncounted_by_torch) as counter:
        model(tokens).logits.sum().backward()
    return counter.get_total_flops()


def growth(**config) -> list[int]:
    """Return the additional FLOPs of every 32 more tokens."""
    model = TransformerVQ(tiny_config(n_layer=1, **config))
    flops = [training_flops(model, seq_len) for seq_len in (32, 64, 96, 128)]
    return [longer - shorter for shorter, longer in pairwise(flops)]


@pytest.mark.parametrize("head_type", ["shga", "mqa", "mha"])
def test_flops_grow_linearly_with_vq_attention_and_quadratically_with_full_attention(head_type):
    assert len(set(growth(head_type=head_type, attention="vq"))) == 1
    first, second, third = growth(head_type=head_type, attention="full")
    assert third - second == second - first > 0
