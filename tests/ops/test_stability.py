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


@pytest.mark.slow
@pytest.mark.parametrize("step", [4096, 1], ids=["in segments", "token by token"])
def test_a_bfloat16_stream_stays_close_to_float64(stream, step):
    low, exact, exact_state = stream
    state, outputs = low.empty_state(), []
    for start in range(0, N_TOKENS, step):
        output, state = vq_attention(*low.part(start, min(start + step, N_TOKENS)), state)
        outputs.append(output)
    got = torch.cat(outputs, dim=-2)
    assert got.dtype == torch.bfloat16
    assert_close("all outputs", got, exact)
    assert_close("the last outputs", got[..., -1000:, :], exact[..., -1000:, :])
    assert (state.cache.mean.dtype, state.cache.count.dtype) == (torch.float32, torch.int64)
    in_cache = low.z[0, 0, : N_TOKENS - 8].bincount(minlength=6)
    assert state.cache.count[0, 0].tolist() == in_cache.tolist()
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
