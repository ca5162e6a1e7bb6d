"""The fused attention equals the plain one, forward and backward, for any tile size."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import (
    assert_bfloat16_close,
    assert_close,
    assert_equal_to_serial,
    attention_inputs,
    run_split,
)
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.ops import fused
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.runtime import EXECUTIONS

HEADS = {"shga": (1, 1), "mqa": (1, 3), "mha": (3, 1)}


@contextmanager
def tiles(n_queries):
    """Process so many queries at a time."""
    before = EXECUTIONS["cpu"]
    EXECUTIONS["cpu"] = replace(before, tile_queries=n_queries)
    try:
        yield
    finally:
        EXECUTIONS["cpu"] = before


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 2, 5, None])
@pytest.mark.parametrize("seq_len", [1, 4, 7, 8, 16, 37])
def test_fused_attention_equals_plain_for_any_tile_size(heads, rows, seq_len):
    h, g = HEADS[heads]
    inputs = attention_inputs(seq_len, h=h, g=g, block_len=8, requires_grad=True)
    with tiles(rows):
        assert_equal_to_serial(inputs)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("grad_through_cache", [True, False])
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("cuts", [(), (3,), (8, 16), (1, 9, 30)])
def test_fused_equals_plain_for_every_option(monkeypatch, cache, grad_through_cache, looks, cuts):
    if not looks:  # as on a GPU, where empty slots are attended to with weight zero
        monkeypatch.setattr(fused, "_is_known_empty", lambda state: False)
    inputs = attention_inputs(40, h=2, g=2, block_len=8, requires_grad=True)
    with tiles(3):
        assert_equal_to_serial(inputs, cuts, cache=cache, grad_through_cache=grad_through_cache)


def assembled_states(inputs):
    """Return states assembled by hand from an empty one and one that has seen 21 tokens."""
    empty = inputs.empty_state()
    _, seen = vq_attention(*inputs.part(0, 21), empty, reduction="serial")
    one, other = torch.tensor([True, False]), torch.tensor([1, 0])
    yield "cache only", replace(empty, cache=seen.cache)
    yield "window only", replace(empty, k=seen.k, v=seen.v, z=seen.z)
    yield "position only", replace(empty, position=seen.position)
    yield "all but the cache", replace(seen, cache=empty.cache)
    yield "all but the position", replace(seen, position=empty.position)
    yield "one row reset", seen.reset(one)
    yield "all rows reset", seen.reset(one | ~one)
    yield "rows swapped", seen.reset(one).select(other)
    yield "counts only", replace(empty, cache=replace(empty.cache, count=seen.cache.count))


def assert_assembled_states_equal(inputs, lengths, **method):
    for name, state in assembled_states(inputs):
        for seq_len in lengths:
            part = inputs.part(21, 21 + seq_len)
            want, want_state = vq_attention(*part, state, reduction="serial")
            got, got_state = vq_attention(*part, state, **method)
            assert_close(name, got, want)
            assert torch.equal(got_state.cache.count, want_state.cache.count), name
            filled = (want_state.cache.count > 0).unsqueeze(-1)
            assert_close(name, got_state.cache.mean * filled, want_state.cache.mean * filled)


def test_states_assembled_by_hand_equal_the_reference():
    assert_assembled_states_equal(attention_inputs(40, h=2, g=2, block_len=8), (1, 8, 19))


@given(
    seq_len=st.integers(1, 50),
    block_len=st.integers(1, 9),
    rows=st.integers(1, 9),
    heads=st.sampled_from(sorted(HEADS)),
    cuts=st.sets(st.integers(1, 49), max_size=4),
    ragged=st.sampled_from(["documents", "padding", "both"]),
    seed=st.integers(0, 1000),
)
def test_documents_and_padding(seq_len, block_len, rows, heads, cuts, ragged, seed):
    h, g = HEADS[heads]
    inputs = attention_inputs(seq_len, h=h, g=g, block_len=block_len, seed=seed, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(2, seq_len, generator=generator) < 0.15
    valid = torch.arange(seq_len) < torch.tensor([[seq_len], [max(1, seq_len - seed % 7)]])
    with tiles(rows):
        assert_equal_to_serial(
            inputs,
            tuple(sorted(cut for cut in cuts if cut < seq_len)),
            document_ids=starts.cumsum(1) if ragged != "padding" else None,
            valid=valid if ragged != "documents" else None,
        )


@pytest.mark.parametrize("heads", HEADS)
def test_bfloat16_is_close_to_float64(heads):
    h, g = HEADS[heads]
    sizes = {"h": h, "g": g, "block_len": 16, "d_k": 32, "d_v": 32, "n_code": 20}
    low = attention_inputs(100, dtype=torch.bfloat16, requires_grad=True, **sizes)
    low.q.data /= 32**0.5  # scores of the size that normalized keys and queries give
    assert_bfloat16_close(low)


def test_codes_without_tokens_in_the_cache_have_no_weight():
    """The mean of such a code is arbitrary."""
    inputs = attention_inputs(20, n_code=50)
    _, state = run_split(inputs)
    assert (state.cache.count == 0).any()
    spoiled = torch.where(state.cache.count.unsqueeze(-1) > 0, state.cache.mean, 1e6)
    more = attention_inputs(9, n_code=50, seed=1)
    outputs = [
        vq_attention(*more.part(0, 9), replace(state, cache=replace(state.cache, mean=mean)))[0]
        for mean in (state.cache.mean, spoiled)
    ]
    assert torch.equal(*outputs)
