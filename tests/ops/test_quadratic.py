"""The reference, checked by plain loops, and attention without a mask (Theorems 3.4 and 3.5)."""

import math
from itertools import product

import pytest
import torch
from helpers import assert_close, assert_same_gradients, attention_inputs

from transformer_vq.ops.blockwise import encoder_attention
from transformer_vq.ops.quadratic import attention_weights, quadratic_attention


def test_definition_3_1_by_plain_loops():
    b, h, g, i, j, d_k, d_v = 2, 2, 3, 4, 5, 3, 2
    q = torch.randn(b, h, g, i, d_k, dtype=torch.float64)
    k = torch.randn(b, h, j, d_k, dtype=torch.float64)
    v = torch.randn(b, h, j, d_v, dtype=torch.float64)
    bias = torch.randn(b, h, g, i, j, dtype=torch.float64)
    got = quadratic_attention(q, k, v, bias)
    want = torch.zeros_like(got)
    for row, head, group, query in product(range(b), range(h), range(g), range(i)):
        at = (row, head, group, query)
        scores = [float(q[at] @ k[row, head, key]) + float(bias[at][key]) for key in range(j)]
        total = sum(math.exp(s) for s in scores)
        for key in range(j):
            want[at] += math.exp(scores[key]) / total * v[row, head, key]
    assert_close("output", got, want)


@pytest.mark.parametrize("phi", [None, torch.exp], ids=["softmax", "elementwise"])
def test_a_column_of_multiplicity_n_weighs_as_n_equal_columns(phi):
    scores = torch.randn(3, 4, dtype=torch.float64)
    multiplicity = torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    got = attention_weights(scores, phi, multiplicity)
    repeated = scores[:, [0, 1, 1, 1, 3, 3]]
    weights = attention_weights(repeated, phi)
    want = torch.stack(
        [weights[:, 0], weights[:, 1:4].sum(1), torch.zeros(3), weights[:, 4:].sum(1)], dim=1
    )
    assert_close("weights", got, want)


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
