"""Padding and documents in linear time: documents and padded rows equal separate sequences."""

from dataclasses import replace

import pytest
import torch
from helpers import (
    Inputs,
    assert_close,
    assert_same_gradients,
    attention_inputs,
    block_starts,
    reference,
    run_split,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.packing import document_ids_from_starts, read_packing
from transformer_vq.ops.quadratic import quadratic_vq_attention

REDUCTIONS = ["auto", "serial", "matmul", "associative", "input_scan"]
HEADS = {"shga": (1, 1), "mqa": (1, 2), "mha": (2, 1)}
L = 4
# One token, shorter and longer than L, on and off its multiples.
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13, 16, 21]), min_size=1, max_size=6)


def ids_of(lengths: list[int]) -> torch.Tensor:
    """Return ids in arbitrary order: only changes matter."""
    ids = [(7 * n) % 31 for n in range(len(lengths))]
    return torch.tensor(ids).repeat_interleave(torch.tensor(lengths))


def rows_of(inputs: Inputs, row: int, index: torch.Tensor) -> Inputs:
    """Return the tokens of one row at the given places as a separate sequence."""
    at = slice(row, row + 1)
    return Inputs(
        inputs.q[at][..., index, :],
        inputs.k_hat[at][..., index, :],
        inputs.z[at][..., index],
        inputs.v[at][..., index, :],
        inputs.codebook,
        inputs.by_distance[at][..., index, :],
        inputs.block_len,
    )


@given(
    lengths=st.tuples(LENGTHS, LENGTHS),
    packed=st.booleans(),
    padding=st.sampled_from(["none", "left", "right", "anywhere"]),
    cuts=st.sets(st.integers(1, 100), max_size=5),
    reduction=st.sampled_from(REDUCTIONS),
    heads=st.sampled_from(sorted(HEADS)),
    cache=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120)
def test_documents_and_padded_rows_equal_separate_sequences(
    lengths, packed, padding, cuts, reduction, heads, cache, seed
):
    h, g = HEADS[heads]
    total = max(sum(row) for row in lengths)
    lengths = [[*row, total - sum(row)] if packed else [total] for row in lengths]
    inputs = attention_inputs(total, h=h, g=g, block_len=L, seed=seed)
    ids = torch.stack([ids_of(row) for row in lengths])
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(0, total + 1, (2, 1), generator=generator)
    valid = {
        "none": torch.ones(2, total, dtype=torch.bool),
        "left": torch.arange(total) >= length,
        "right": torch.arange(total) < length,
        "anywhere": torch.rand(2, total, generator=generator) < 0.6,
    }[padding]
    got, state = run_split(
        inputs,
        sorted(cut for cut in cuts if cut < total),
        document_ids=ids.masked_fill(~valid, -100) if packed else None,
        valid=None if padding == "none" else valid,
        cache=cache,
        reduction=reduction,
    )
    for row in range(2):
        assert not got[row][..., ~valid[row], :].any()
        if not valid[row].any():
            assert int(state.position[row]) == 0
            continue
        for document in ids[row][valid[row]].unique_consecutive():
            index = ((ids[row] == document) & valid[row]).nonzero().flatten()
            separate = rows_of(inputs, row, index)
            want = reference(separate, window_only=not cache)
            assert_close("document", got[row : row + 1][..., index, :], want)
        # The state holds the last document and nothing else.
        _, want_state = run_split(separate, (), cache=cache)
        assert int(state.position[row]) == len(index)
        recent = min(len(index), L)
        assert torch.equal(state.v[row, :, L - recent :], want_state.v[0, :, L - recent :])
        if cache:
            assert torch.equal(state.cache.count[row], want_state.cache.count[0])
            weight = want_state.cache.count[0, ..., None]
            assert_close("cache", state.cache.mean[row] * weight, want_state.cache.mean[0] * weight)


@pytest.mark.parametrize("cuts", [(), (5, 6), (16,)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_equal_those_of_the_reference_with_the_document_mask(reduction, heads, cuts):
    h, g = HEADS[heads]
    lengths = [[13, 1, 4, 9, 6], [2, 31]]
    inputs = attention_inputs(33, h=h, g=g, block_len=L, requires_grad=True)
    ids = torch.stack([ids_of(row) for row in lengths])
    got, _ = run_split(inputs, cuts, document_ids=ids, reduction=reduction)
    want = quadratic_vq_attention(
        inputs.q,
        inputs.k_hat,
        inputs.v,
        inputs.by_distance,
        block_starts=block_starts(33, L, cuts),
        visible=ids[:, :, None] == ids[:, None, :],
    )
    assert_close("output", got, want)
    assert_same_gradients(inputs.leaves(), got, want)


def test_document_ids_from_starts_continue_across_segments():
    inputs = attention_inputs(10, b=1, block_len=L)
    starts = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    whole, _ = run_split(inputs, (), document_ids=document_ids_from_starts(starts))
    state, parts = inputs.empty_state(), []
    for start, stop in ((0, 5), (5, 7), (7, 10)):
        ids = document_ids_from_starts(starts[:, start:stop], state.document)
        packing = read_packing(state, stop - start, None, ids)
        output, state = vq_attention(*inputs.part(start, stop), state, packing=packing)
        state = replace(state, document=packing.document)
        parts.append(output)
    assert_close("output", torch.cat(parts, dim=-2), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"valid": torch.ones(2, 3)}, "want torch.bool"),
        ({"valid": torch.ones(2, 4, dtype=torch.bool)}, r"shape \(2, 4\), want \(2, 3\)"),
        ({"document_ids": torch.zeros(2, dtype=torch.int64)}, "shape"),
        ({"document_ids": torch.zeros(2, 3)}, "integers"),
        ({"document_ids": torch.tensor([[0, 0, 0], [1, 2, 1]])}, "reappears in row 1"),
        ({"document_ids": torch.tensor([[0, 0, -1], [0, 0, 0]])}, "negative"),
    ],
)
def test_malformed_or_contradictory_input_is_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_packing(attention_inputs(3).empty_state(), 3, **arguments)


def test_documents_that_contradict_the_state_are_rejected():
    inputs = attention_inputs(6, block_len=L)
    _, state = vq_attention(*inputs.part(0, 3), inputs.empty_state())
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="unknown whether its document continues"):
        read_packing(state, 3, None, ids)
    assert read_packing(state.reset(torch.tensor([True, True])), 3, None, ids) is not None
    _, state = run_split(inputs, (), document_ids=torch.full((2, 6), 5))
    with pytest.raises(ValueError, match="reappears"):
        read_packing(state, 2, None, torch.tensor([[5, 6], [6, 5]]))
