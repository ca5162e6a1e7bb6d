"""Sinusoids and biases against their definitions, element by element."""

import math

import pytest
import torch

from transformer_vq.nn.attention import VQAttention
from transformer_vq.ops.position import causal_bias, local_bias, sinusoids


def test_sinusoids_are_sines_then_cosines():
    width, wavelength = 6, 1e5
    got = sinusoids(torch.tensor([0, 1, 7]), width, wavelength, torch.float64)
    for row, position in enumerate([0, 1, 7]):
        angles = [position / wavelength ** (2 * i / width) for i in range(width // 2)]
        want = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert got[row].tolist() == pytest.approx(want, abs=1e-15)


def test_relative_sinusoids_are_ordered_farthest_first():
    layer = VQAttention(4, d_k=2, n_code=4, block_len=3)
    table = layer.sinusoids(layer.init_state(1), 5)
    assert torch.equal(table, sinusoids(torch.tensor([3, 2, 1, 0]), 4, 1e5, torch.float32))


@pytest.mark.parametrize("older", [0.0, -math.inf])
@pytest.mark.parametrize("n_query", [1, 2, 5])
def test_local_bias_puts_each_distance_in_its_place(n_query, older):
    window_len = 5
    by_distance = torch.randn(2, n_query, window_len + 1)
    bias = local_bias(by_distance, older)
    assert bias.shape == (2, n_query, window_len + n_query)
    for i in range(n_query):
        for j in range(window_len + n_query):
            distance = i + window_len - j
            if distance < 0:
                want = torch.full((2,), -math.inf)
            elif distance > window_len:
                want = torch.full((2,), older)
            else:
                want = by_distance[:, i, window_len - distance]
            assert torch.equal(bias[:, i, j], want)


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 4), (3, 3), (3, 7)])
def test_causal_bias_puts_each_distance_in_its_place_and_passes_its_gradient_back(n_query, n_key):
    # Parts of larger tensors, which do not begin where their memory does.
    by_distance = torch.randn(3, 2, n_query, n_key, dtype=torch.float64, requires_grad=True)[1:]
    probe = torch.randn(3, 2, n_query, n_key, dtype=torch.float64)[1:]
    bias = causal_bias(by_distance)
    (gradient,) = torch.autograd.grad(bias, by_distance, probe)
    want, want_gradient = torch.full_like(bias, -math.inf), torch.zeros_like(gradient)
    for i in range(n_query):
        for j in range(i + n_key - n_query + 1):
            at = n_key - 1 - (i + n_key - n_query - j)
            want[..., i, j] = by_distance[..., i, at]
            want_gradient[..., i, at] += probe[..., i, j]
    assert torch.equal(bias, want)
    assert torch.equal(gradient, want_gradient)
