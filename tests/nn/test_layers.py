"""The small parts compute what they say, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_gradients

from transformer_vq.nn.layers import FeedForward, gated, rms_norm


def same_with_gradients(got, want, *leaves):
    assert_close("value", got, want)
    assert_same_gradients(dict(enumerate(leaves)), got, want)


def test_the_feed_forward_and_its_gradient_are_those_of_the_formula():
    torch.manual_seed(0)
    layer = FeedForward(6, 24).double()
    leaves = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), *layer.parameters()]
    x, w_in, w_out = leaves
    want = (rms_norm(x) @ w_in.T).clamp(min=0).pow(2) @ w_out.T
    same_with_gradients(layer(x), want, *leaves)


@pytest.mark.parametrize("shape", [(2, 5, 6), (3, 1, 2, 4, 8)])
def test_rms_norm_and_its_gradient_are_those_of_torch(shape):
    x = torch.randn(shape, dtype=torch.float64).mul_(3)
    x[0, 0] = 0.0
    for leaf in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):  # any order in memory
        leaf = leaf.clone().requires_grad_()
        want = F.rms_norm(leaf, shape[-1:], eps=1e-6)
        same_with_gradients(rms_norm(leaf), want, leaf)


def test_rms_norm_is_computed_in_float32_at_least():
    x = torch.randn(4, 256).bfloat16()
    assert torch.equal(rms_norm(x), rms_norm(x.float()).bfloat16())


def test_the_gate_and_its_gradient_are_those_of_the_formula():
    x, gate = (torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    same_with_gradients(gated(x, gate), x * gate * torch.sigmoid(gate), x, gate)
