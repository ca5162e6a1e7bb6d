"""bfloat16 attention through a long stream stays within bfloat16 of float64 (Remark 3.9)."""

import pytest
import torch
from helpers import assert_close, attention_inputs

from transformer_vq.ops.blockwise import vq_attention

N_TOKENS = 200_000


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
        pytest.param(4096, N_TOKENS, id="in segments"),
        pytest.param(1, 5_000, id="token by token"),
        pytest.param(1, N_TOKENS, id="token by token to the end", marks=pytest.mark.slow),
    ],
)
def test_a_bfloat16_stream_stays_with_float64(stream, step, n_tokens):
    low, exact, exact_state = stream
    got, state = run_in_steps(low, step, n_tokens)
    assert got.dtype == torch.bfloat16
    assert_close("all outputs", got, exact[..., :n_tokens, :])
    last = slice(n_tokens - 1000, n_tokens)
    assert_close("the last outputs", got[..., last, :], exact[..., last, :])
    assert state.cache.count.dtype == state.cache.mean.dtype == torch.float32
    in_cache = low.z[0, 0, : n_tokens - 8].bincount(minlength=6)
    assert state.cache.count[0, 0].tolist() == in_cache.tolist()
    if n_tokens == N_TOKENS:
        assert_close("means", state.cache.mean.double(), exact_state.cache.mean, tolerance=1e-4)
