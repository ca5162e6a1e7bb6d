"""The small parts compute what they say, gradients included."""

import torch
from helpers import assert_close

from transformer_vq.nn.layers import FeedForward, rms_norm


def test_the_feed_forward_and_its_gradient_are_those_of_the_formula():
    torch.manual_seed(0)
    layer = FeedForward(6, 24).double()
    leaves = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), *layer.parameters()]
    x, w_in, w_out = leaves
    got = layer(x)
    want = (rms_norm(x) @ w_in.T).clamp(min=0).pow(2) @ w_out.T
    assert_close("output", got, want)
    probe = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got * probe).sum(), leaves),
        torch.autograd.grad((want * probe).sum(), leaves),
        strict=True,
    ):
        assert_close("gradient", a, b)
