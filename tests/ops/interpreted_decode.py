"""The decode kernel equals `attend_one_`, token by token, in the interpreter.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close, attention_inputs
from interpreter import detectors

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.triton import launch
from transformer_vq.ops.triton.decode import decode_token_

L = 3
HEADS = {"shga": (1, 1), "mha": (2, 1), "mqa": (1, 3), "gqa": (2, 2)}


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    tiles = launch.TILES["decode_token"]
    small = tuple(replace(x, values=16) for x in tiles)
    monkeypatch.setitem(launch.TILES, "decode_token", small)
    with detectors():
        yield


def ring_of(state):
    """Return the tensors that the kernel updates: a ring with a free slot before the window."""
    pad = torch.nn.functional.pad
    return {
        "ring_k": pad(state.k, (0, 0, 1, 0)),
        "ring_v": pad(state.v, (0, 0, 1, 0)),
        "ring_z": pad(state.z, (1, 0)),
        "position": state.position.clone(),
        "slot": torch.zeros(1, dtype=torch.int64),
        "mean": None if state.cache is None else state.cache.mean.clone(),
        "count": None if state.cache is None else state.cache.count.clone(),
        "arrived": torch.zeros(1, dtype=torch.int32),
    }


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_decoding_equals_segments_of_one_token(heads, cache):
    """Rows at different positions; enough tokens for the ring to wrap and tokens to be evicted."""
    h, g = HEADS[heads]
    n = 9 if heads == "shga" else 3
    sizes = {"h": h, "g": g, "d_v": 20, "block_len": L, "dtype": torch.float32}
    inputs = attention_inputs(4 + n, **sizes)
    _, state = vq_attention(*inputs.part(0, 4), inputs.empty_state(cache), reduction="serial")
    state = state.reset(torch.tensor([False, True]))
    ring = ring_of(state)
    for t in range(4, 4 + n):
        q, k_hat, z, v, codebook, by_distance = inputs.part(t, t + 1)
        want, state = vq_attention(q, k_hat, z, v, codebook, by_distance, state, reduction="serial")
        token = (q[..., 0, :], k_hat[..., 0, :], z[..., 0], v[..., 0, :])
        got = decode_token_(*token, codebook, by_distance[..., 0, :], **ring)
        assert_close("output", got, want[..., 0, :])
    order = (ring["slot"] + torch.arange(1, L + 1)) % (L + 1)
    assert int(ring["slot"]) == n % (L + 1)
    assert int(ring["arrived"]) == 0
    assert torch.equal(ring["position"], state.position)
    filled = state.window_valid[:, None, :, None]
    for name, x in (("ring_k", state.k), ("ring_v", state.v)):
        assert torch.equal(ring[name].index_select(-2, order) * filled, x * filled)
    z = ring["ring_z"].index_select(-1, order)
    assert torch.equal(z * filled[..., 0], state.z * filled[..., 0])
    if cache:
        assert torch.equal(ring["count"], state.cache.count)
        seen = (state.cache.count > 0).unsqueeze(-1)
        assert_close("mean", ring["mean"] * seen, state.cache.mean * seen)


def test_positional_scores_are_optional():
    inputs = attention_inputs(5, d_v=20, block_len=L, dtype=torch.float32)
    q, k_hat, z, v, codebook, _ = inputs.part(0, 4)
    _, state = vq_attention(q, k_hat, z, v, codebook, None, inputs.empty_state())
    q, k_hat, z, v, codebook, _ = inputs.part(4, 5)
    want, _ = vq_attention(q, k_hat, z, v, codebook, None, state, reduction="serial")
    token = (q[..., 0, :], k_hat[..., 0, :], z[..., 0], v[..., 0, :])
    got = decode_token_(*token, codebook, None, **ring_of(state))
    assert_close("output", got, want[..., 0, :])
