"""The reference itself, checked by plain loops: everything else is compared with it."""

import math

import pytest
import torch
from helpers import assert_close

from transformer_vq.ops.quadratic import attention_weights, quadratic_attention


def test_definition_3_1_by_plain_loops():
    b, h, g, i, j, d_k, d_v = 2, 2, 3, 4, 5, 3, 2
    q = torch.randn(b, h, g, i, d_k, dtype=torch.float64)
    k = torch.randn(b, h, j, d_k, dtype=torch.float64)
    v = torch.randn(b, h, j, d_v, dtype=torch.float64)
    bias = torch.randn(b, h, g, i, j, dtype=torch.float64)
    got = quadratic_attention(q, k, v, bias)
    want = torch.zeros_like(got)
    for row in range(b):
        for head in range(h):
            for group in range(g):
                for query in range(i):
                    scores = [
                        float(q[row, head, group, query] @ k[row, head, key])
                        + float(bias[row, head, group, query, key])
                        for key in range(j)
                    ]
                    total = sum(math.exp(s) for s in scores)
                    for key in range(j):
                        weight = math.exp(scores[key]) / total
                        want[row, head, group, query] += weight * v[row, head, key]
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
