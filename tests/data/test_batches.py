"""Batches for truncated BPTT: each token is a target once per epoch; batches depend on the step."""

import math
from itertools import pairwise

import numpy as np
import torch
from data_helpers import rejection
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.batches import TrainingBatches, packs_documents, read_positions, read_rows
from transformer_vq.data.corpus import Split, SplitSize

BOS = 7_000_000
FIELDS = ("tokens", "targets", "valid", "document_ids")


def make_split(n, starts=(0,)):
    """Return tokens that encode their index in the split: 1,000,000, 1,000,001, ..."""
    tokens = np.arange(n, dtype=np.uint32) + 1_000_000
    return Split(tokens, np.array(starts), BOS, SplitSize(n, len(starts), n, None))


def indices(batch):
    """Return the index of each target in the split; -1 for padding."""
    found = batch.targets - 1_000_000
    return found if batch.valid is None else found.masked_fill(~batch.valid, -1)


def targets_with(batch, name):
    """Return (index, value of a field) for all targets without padding."""
    values = zip(indices(batch).flatten(), getattr(batch, name).flatten(), strict=True)
    return [(int(index), int(value)) for index, value in values if index >= 0]


def rows_of(batches, n_rows):
    """Return the target indices of complete sequences, in the order of training."""
    rows, step = [], 0
    while len(rows) < n_rows:
        assert batches.starts_sequences(step)
        spans = [indices(batches[step + i]) for i in range(batches.n_spans)]
        rows += torch.cat(spans, dim=1).tolist()
        step += batches.n_spans
    return rows[:n_rows]


def assert_same(one, other):
    for name in FIELDS:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


@st.composite
def any_batches(draw):
    """Draw batches over a split of any length with documents anywhere."""
    backprop_len = draw(st.integers(1, 5))
    seq_len = backprop_len * draw(st.integers(1, 4))
    n = draw(st.integers(seq_len, 70))
    starts = sorted({0} | draw(st.sets(st.integers(0, n - 1), max_size=10)))
    batch_size = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**63 - 1))
    return TrainingBatches(make_split(n, starts), batch_size, seq_len, backprop_len, seed)


def again(batches, split):
    """Return batches with the same settings over a split."""
    sizes = (batches.batch_size, batches.seq_len, batches.backprop_len)
    return TrainingBatches(split, *sizes, batches.seed)


def steps_of(batches, n_epochs=2):
    n_batches = math.ceil(n_epochs * batches.n_sequences / batches.batch_size)
    return range(n_batches * batches.n_spans)


@given(any_batches())
def test_each_token_is_a_target_exactly_once_per_epoch(batches):
    n, n_epochs = len(batches.split), 3
    rows = rows_of(batches, n_epochs * batches.n_sequences)
    for epoch in range(n_epochs):
        of_epoch = rows[epoch * batches.n_sequences : (epoch + 1) * batches.n_sequences]
        assert sorted(index for row in of_epoch for index in row if index >= 0) == list(range(n))


@given(any_batches())
def test_inputs_are_the_preceding_tokens_or_bos_at_document_starts(batches):
    starts = set(batches.split.starts.tolist())
    for step in steps_of(batches):
        for index, token in targets_with(batches[step], "tokens"):
            assert token == (BOS if index in starts else 1_000_000 + index - 1)


@given(any_batches())
def test_spans_of_a_sequence_are_consecutive_and_padding_comes_last(batches):
    length = batches.seq_len
    for row in rows_of(batches, batches.n_sequences):
        first = row[0]
        assert first % length == 0
        stop = min(first + length, len(batches.split))
        assert row == list(range(first, stop)) + [-1] * (first + length - stop)


@given(any_batches())
def test_document_ids_are_given_exactly_for_packed_documents(batches):
    starts = batches.split.starts
    several = any(start % batches.seq_len for start in starts.tolist())
    assert packs_documents(batches.split, batches.seq_len) == several
    for step in steps_of(batches):
        batch = batches[step]
        assert (batch.document_ids is not None) == several
        if batch.document_ids is not None:
            at = indices(batch)
            want = (torch.from_numpy(starts) <= at.unsqueeze(-1)).sum(-1) - 1
            assert torch.equal(batch.document_ids[at >= 0], want[at >= 0])


def order_of(batches, epoch=0):
    rows = rows_of(batches, (epoch + 1) * batches.n_sequences)
    return [row[0] for row in rows[epoch * batches.n_sequences :]]


def test_orders_differ_between_seeds_and_epochs():
    one, other = (TrainingBatches(make_split(200), 3, 4, 2, seed=seed) for seed in (0, 1))
    orders = [order_of(one, epoch) for epoch in range(3)] + [order_of(other)]
    assert len(set(map(tuple, orders))) == 4
    assert all(order != sorted(order) for order in orders)


@given(any_batches(), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_batch_does_not_depend_on_earlier_reads(batches, steps):
    for step in steps:
        assert_same(batches[step], again(batches, batches.split)[step])


def test_a_split_shorter_than_a_sequence_is_rejected():
    TrainingBatches(make_split(8), 1, seq_len=8, backprop_len=4)
    message = rejection(TrainingBatches, make_split(7), 1, 8, 4)
    assert message.startswith("the training split has 7 tokens, fewer than one sequence of 8; use")


def test_read_rows_reads_contexts_of_different_lengths():
    split = make_split(30, starts=(0, 5, 11))
    batch = read_rows(
        split, np.array([0, 5, 11]), np.array([5, 11, 30]), 4, 3, with_document_ids=True
    )
    assert indices(batch).tolist() == [[4, -1, -1], [9, 10, -1], [15, 16, 17]]
    assert (batch.tokens[batch.valid] - 1_000_000).tolist() == [3, 8, 9, 14, 15, 16]
    positions = read_positions(split, np.array([0, 5, 11]), 4, 3)
    assert positions[batch.valid].tolist() == [4, 4, 5, 4, 5, 6]
    assert read_positions(split, np.array([3]), 0, 4).tolist() == [[0, 1, 0, 1]]
    assert batch.document_ids[batch.valid].tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.n_targets == 6


@given(any_batches(), st.randoms())
def test_batches_do_not_depend_on_where_documents_are_stored(batches, random):
    split = batches.split
    edges = [*split.starts.tolist(), len(split)]
    documents = [split.stored[a:b] for a, b in pairwise(edges)]
    order = list(range(len(documents)))
    random.shuffle(order)
    offsets = np.zeros(len(documents), dtype=np.int64)
    for i, document in enumerate(order):
        offsets[document] = sum(len(documents[x]) for x in order[:i])
    stored = np.concatenate([documents[i] for i in order])
    moved = Split(stored, split.starts, BOS, split.size, offsets)
    assert (moved.tokens == split.tokens).all()
    other = again(batches, moved)
    for step in steps_of(batches):
        assert_same(batches[step], other[step])
