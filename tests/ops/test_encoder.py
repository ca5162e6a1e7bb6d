"""Theorems 3.4 and 3.5: without a mask, S codewords represent all T keys."""

import pytest
import torch
from helpers import assert_close, assert_same_gradients, attention_inputs

from transformer_vq.ops.blockwise import encoder_attention
from transformer_vq.ops.quadratic import quadratic_attention


def squared_relu(scores: torch.Tensor) -> torch.Tensor:
    return scores.relu().square()


@pytest.mark.parametrize("phi", [None, squared_relu], ids=["softmax", "elementwise"])
@pytest.mark.parametrize(("h", "g"), [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("seq_len", [1, 6, 29])
def test_encoder_attention_equals_the_quadratic_form(seq_len, h, g, phi):
    inputs = attention_inputs(seq_len, h=h, g=g, requires_grad=True)
    got = encoder_attention(inputs.q, inputs.z, inputs.v, inputs.codebook, phi=phi)
    # Keys enter through the codebook, which has no gradient.
    want = quadratic_attention(inputs.q, inputs.k_hat.detach(), inputs.v, phi=phi)
    assert_close("output", got, want)
    assert_same_gradients({"q": inputs.q, "v": inputs.v}, got, want)


def test_invalid_positions_are_not_attended_to():
    inputs = attention_inputs(9)
    valid = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    got = encoder_attention(inputs.q, inputs.z, inputs.v, inputs.codebook, valid=valid)
    bias = torch.where(valid, 0.0, -torch.inf)[:, None, None, None]
    want = quadratic_attention(inputs.q, inputs.k_hat, inputs.v, bias)
    assert_close("output", got, want)
