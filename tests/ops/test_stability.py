"""A long stream drifts from float64 no further than a single rounding would (Remark 3.9)."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close, attention_inputs, decode_all

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.cache import block_stats, merge

N_TOKENS = 100_000


@pytest.fixture(scope="module")
def stream():
    """The same tokens in bfloat16 and in float64, and the exact outputs and counts."""
    low = attention_inputs(
        N_TOKENS, b=1, block_len=8, n_code=6, d_k=4, d_v=4, dtype=torch.bfloat16, seed=7
    )
    # A code that takes most of the keys: its count passes 256, where a bfloat16 count would stop.
    low.z = torch.where(torch.rand(low.z.shape) < 0.7, 0, low.z)
    low.k_hat = low.codebook[0][low.z[:, 0]][:, None]
    # Values with a mean, so that the running means have something to lose.
    low.v = low.v + 1
    high = attention_inputs(N_TOKENS, b=1, block_len=8, n_code=6, d_k=4, d_v=4, seed=7)
    for name in ("q", "k_hat", "v", "codebook", "by_distance"):
        setattr(high, name, getattr(low, name).double())
    high.z = low.z
    output, state = vq_attention(*high.part(0, N_TOKENS), high.empty_state())
    return low, output, state


def run_in_steps(inputs, step: int, n_tokens: int):
    state, outputs = inputs.empty_state(), []
    for start in range(0, n_tokens, step):
        output, state = vq_attention(*inputs.part(start, min(start + step, n_tokens)), state)
        outputs.append(output)
    return torch.cat(outputs, dim=-2), state


@pytest.mark.parametrize(
    ("step", "n_tokens"),
    [
        pytest.param(4096, N_TOKENS, id="in segments", marks=pytest.mark.slow),
        pytest.param(1, 2_500, id="token by token", marks=pytest.mark.slow),
        pytest.param(1, N_TOKENS, id="token by token to the end", marks=pytest.mark.slow),
    ],
)
def test_a_bfloat16_stream_stays_close_to_float64(stream, step, n_tokens):
    low, exact, exact_state = stream
    got, state = run_in_steps(low, step, n_tokens)
    assert got.dtype == torch.bfloat16
    assert_close("all outputs", got, exact[..., :n_tokens, :])
    last = slice(n_tokens - 1000, n_tokens)
    assert_close("the last outputs", got[..., last, :], exact[..., last, :])
    assert (state.cache.mean.dtype, state.cache.count.dtype) == (torch.float32, torch.int64)
    in_cache = low.z[0, 0, : n_tokens - 8].bincount(minlength=6)
    assert state.cache.count[0, 0].tolist() == in_cache.tolist()
    if n_tokens == N_TOKENS:
        tolerance = 5e-6 if step > 1 else 5e-5  # rounding errors of 12,500 or 100,000 merges
        assert_close("means", state.cache.mean.double(), exact_state.cache.mean, tolerance)


@pytest.mark.parametrize("reduction", ["auto", "serial", "matmul", "associative"])
@pytest.mark.parametrize("step", [4096, 40_000])
def test_float32_means_stay_close_to_float64(reduction, step):
    n_tokens = 40_000
    low = attention_inputs(
        n_tokens, b=1, block_len=64, n_code=4, d_k=4, d_v=8, dtype=torch.float32, seed=3
    )
    low.v = low.v + 1
    means = torch.stack(
        [
            low.v[0, 0, : n_tokens - 64][low.z[0, 0, : n_tokens - 64] == code].double().mean(0)
            for code in range(4)
        ]
    )
    state = low.empty_state()
    for start in range(0, n_tokens, step):
        part = low.part(start, min(start + step, n_tokens))
        _, state = vq_attention(*part, state, reduction=reduction)
    assert_close("means", state.cache.mean[0, 0].double(), means, tolerance=1e-6)


def test_counts_are_exact_beyond_the_integers_of_float32():
    """Every token counts after 2^24 tokens of one code: in merges, blocks and single steps."""
    inputs = attention_inputs(16, b=1, block_len=4, n_code=3, dtype=torch.float32)
    inputs.z = torch.zeros_like(inputs.z)
    many = torch.tensor([[[2**24, 0, 5]]])
    full = replace(inputs.empty_state(), position=torch.tensor([2**24 + 9]))
    full = replace(full, cache=replace(full.cache, count=many))
    one = block_stats(torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, 6), 3)
    assert merge(full.cache, one).count.tolist() == [[[2**24 + 1, 0, 5]]]
    for reduction in ("auto", "serial", "matmul", "associative", "input_scan"):
        _, state = vq_attention(*inputs.part(0, 13), full, reduction=reduction)
        assert state.cache.count.tolist() == [[[2**24 + 13, 0, 5]]], reduction
    _, state = decode_all(inputs, 0, 13, full)
    assert state.cache.count.tolist() == [[[2**24 + 13, 0, 5]]]
