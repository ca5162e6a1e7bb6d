"""Windows for truncated BPTT: every token a target once per epoch, in an order without a memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.batches import Batch, TrainingBatches, cuts_documents, read_rows
from transformer_vq.data.corpus import Split, SplitSize
from transformer_vq.data.sources.base import DataError

BOS = 7_000_000
FIELDS = ("tokens", "targets", "positions", "valid", "document_ids")


def make_split(n, starts=(0,)):
    """Tokens that tell their place: 1,000,000, 1,000,001, ..."""
    tokens = np.arange(n, dtype=np.uint32) + 1_000_000
    return Split(tokens, np.array(starts), BOS, SplitSize(n, len(starts), n, None))


def places(batch):
    """Where in the split the targets stand; -1 for padding."""
    found = batch.targets - 1_000_000
    return found if batch.valid is None else found.masked_fill(~batch.valid, -1)


def targets_with(batch, name):
    """Places of all targets, each with its number in another field."""
    numbers = zip(places(batch).flatten(), getattr(batch, name).flatten(), strict=True)
    return [(int(place), int(number)) for place, number in numbers if place >= 0]


def rows_of(batches, n_rows):
    """Whole sequences in the order in which a run meets them: places of their targets."""
    rows, update = [], 0
    while len(rows) < n_rows:
        assert batches.begins(update)
        windows = [places(batches[update + i]) for i in range(batches.n_windows)]
        rows += torch.cat(windows, dim=1).tolist()
        update += batches.n_windows
    return rows[:n_rows]


def assert_same(one, other):
    for name in FIELDS:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


@st.composite
def any_batches(draw):
    """Batches over a split of any length with documents anywhere."""
    backprop_len = draw(st.integers(1, 5))
    seq_len = backprop_len * draw(st.integers(1, 4))
    n = draw(st.integers(seq_len, 70))
    starts = sorted({0} | draw(st.sets(st.integers(0, n - 1), max_size=10)))
    batch_size = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**63 - 1))
    return TrainingBatches(make_split(n, starts), batch_size, seq_len, backprop_len, seed)


def updates_of(batches, n_epochs=2):
    n_batches = math.ceil(n_epochs * batches.n_sequences / batches.batch_size)
    return range(n_batches * batches.n_windows)


@given(any_batches())
def test_every_token_is_a_target_exactly_once_per_epoch(batches):
    n, n_epochs = len(batches.split), 3
    rows = rows_of(batches, n_epochs * batches.n_sequences)
    for epoch in range(n_epochs):
        of_epoch = rows[epoch * batches.n_sequences : (epoch + 1) * batches.n_sequences]
        assert sorted(place for row in of_epoch for place in row if place >= 0) == list(range(n))


def test_a_batch_larger_than_the_split_holds_several_epochs():
    batches = TrainingBatches(make_split(10), batch_size=9, seq_len=4, backprop_len=2)
    assert batches.n_sequences == 3
    targets = torch.cat([places(batches[0]), places(batches[1])], dim=1)
    counts = torch.bincount(targets[targets >= 0], minlength=10)
    assert counts.tolist() == [3] * 10


@given(any_batches())
def test_the_input_is_the_token_before_or_bos_where_a_document_begins(batches):
    starts = set(batches.split.starts.tolist())
    for update in updates_of(batches):
        for place, token in targets_with(batches[update], "tokens"):
            assert token == (BOS if place in starts else 1_000_000 + place - 1)


@given(any_batches())
def test_windows_of_a_sequence_follow_each_other(batches):
    length = batches.seq_len
    for row in rows_of(batches, batches.n_sequences):
        first = row[0]
        assert first % length == 0
        stop = min(first + length, len(batches.split))
        assert row == list(range(first, stop)) + [-1] * (first + length - stop)


@given(any_batches())
def test_padding_stands_behind_what_counts_and_is_marked_only_where_it_is(batches):
    for update in updates_of(batches):
        valid = batches[update].valid
        if valid is not None:
            assert not valid.all()
            assert not (valid[:, 1:] & ~valid[:, :-1]).any()


def test_the_last_sequence_is_padded():
    batches = TrainingBatches(make_split(10), batch_size=3, seq_len=4, backprop_len=4)
    batch = batches[0]
    (last,) = [i for i, row in enumerate(batch.targets.tolist()) if row[0] == 1_000_008]
    assert batch.valid[last].tolist() == [True, True, False, False]
    assert int((~batch.valid).sum()) == 2
    assert batch.n_targets == 10


def test_nothing_is_marked_as_padding_where_there_is_none():
    batches = TrainingBatches(make_split(12), batch_size=2, seq_len=4, backprop_len=2)
    assert all(batches[update].valid is None for update in range(12))


@given(any_batches())
def test_document_ids_mark_exactly_the_documents(batches):
    starts = batches.split.starts
    several = any(start % batches.seq_len for start in starts.tolist())
    assert cuts_documents(batches.split, batches.seq_len) == several
    for update in updates_of(batches):
        batch = batches[update]
        assert (batch.document_ids is not None) == several
        if batch.document_ids is not None:
            at = places(batch)
            want = (torch.from_numpy(starts) <= at.unsqueeze(-1)).sum(-1) - 1
            assert torch.equal(batch.document_ids[at >= 0], want[at >= 0])


def test_documents_that_fill_whole_sequences_need_no_ids():
    split = make_split(24, starts=(0, 8, 20))
    assert not cuts_documents(split, 4)
    assert cuts_documents(split, 8)
    batches = TrainingBatches(split, batch_size=6, seq_len=4, backprop_len=4)
    assert batches[0].document_ids is None


@given(any_batches())
def test_positions_count_the_tokens_of_the_context_before_each_token(batches):
    starts = batches.split.starts.tolist()
    for update in updates_of(batches):
        for place, position in targets_with(batches[update], "positions"):
            document = max(start for start in starts if start <= place)
            sequence = place // batches.seq_len * batches.seq_len
            assert position == place - max(document, sequence)


def order_of(batches, epoch=0):
    rows = rows_of(batches, (epoch + 1) * batches.n_sequences)
    return [row[0] for row in rows[epoch * batches.n_sequences :]]


def make_batches(seed=0):
    return TrainingBatches(make_split(200), 3, seq_len=4, backprop_len=2, seed=seed)


def test_the_same_seed_gives_the_same_order():
    one, other = make_batches(seed=5), make_batches(seed=5)
    for update in updates_of(one):
        assert_same(one[update], other[update])


def test_another_seed_gives_another_order():
    assert order_of(make_batches(seed=0)) != order_of(make_batches(seed=1))


def test_every_epoch_has_an_order_of_its_own():
    batches = make_batches()
    orders = [order_of(batches, epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(order != sorted(order) for order in orders)


@given(any_batches(), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_an_update_sees_the_same_whatever_was_read_before(batches, updates):
    for update in updates:
        fresh = TrainingBatches(
            batches.split,
            batches.batch_size,
            batches.seq_len,
            batches.backprop_len,
            batches.seed,
        )
        assert_same(batches[update], fresh[update])


def test_new_sequences_begin_every_n_windows():
    batches = TrainingBatches(make_split(40), batch_size=2, seq_len=12, backprop_len=4)
    assert batches.n_windows == 3
    assert [batches.begins(update) for update in range(7)] == [
        *(True, False, False),
        *(True, False, False),
        True,
    ]


def test_shapes_and_types_are_those_of_the_model():
    batches = TrainingBatches(make_split(50, (0, 9)), batch_size=5, seq_len=8, backprop_len=4)
    batch = batches[1]
    for name in ("tokens", "targets", "positions", "document_ids"):
        assert getattr(batch, name).shape == (5, 4)
        assert getattr(batch, name).dtype == torch.int64
    assert batches[9].valid.dtype == torch.bool


def test_a_split_shorter_than_a_sequence_is_refused():
    TrainingBatches(make_split(8), 1, seq_len=8, backprop_len=4)
    with pytest.raises(DataError) as raised:
        TrainingBatches(make_split(7), 1, seq_len=8, backprop_len=4)
    assert str(raised.value) == (
        "the training split has 7 tokens, fewer than one sequence of 8; use more data, or a "
        "smaller train.seq_len and train.backprop_len"
    )


def test_contexts_of_any_length_are_read_from_any_place():
    split = make_split(30, starts=(0, 5, 11))
    batch = read_rows(split, np.array([0, 5, 11]), np.array([5, 11, 30]), 4, 3, documents=True)
    assert places(batch).tolist() == [[4, -1, -1], [9, 10, -1], [15, 16, 17]]
    assert (batch.tokens[batch.valid] - 1_000_000).tolist() == [3, 8, 9, 14, 15, 16]
    assert batch.positions[batch.valid].tolist() == [4, 4, 5, 4, 5, 6]
    assert batch.document_ids[batch.valid].tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.n_targets == 6


def test_map_reaches_every_tensor_and_leaves_none_alone():
    batches = TrainingBatches(make_split(10, (0, 3)), batch_size=3, seq_len=4, backprop_len=4)
    batch = batches[0]
    rows = batch.map(lambda x: x[1:])
    for name in FIELDS:
        assert torch.equal(getattr(rows, name), getattr(batch, name)[1:])
    plain = Batch(batch.tokens, batch.targets, batch.positions).map(lambda x: x + 1)
    assert torch.equal(plain.positions, batch.positions + 1)
    assert plain.valid is plain.document_ids is None


def test_targets_are_counted_without_padding():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert Batch(tokens, tokens, tokens).n_targets == 6
    assert Batch(tokens, tokens, tokens, valid).n_targets == 3
