"""Order and splits of documents: by content, divided at document boundaries where possible."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.scan import Scan, plan_splits, scan_documents
from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.sources.readers import Piece


def pieces(documents, size=10**6):
    for document in documents:
        for start in range(0, len(document), size):
            yield Piece(document[start : start + size], start == 0, "file")


def scan(documents, split=None, part=0, size=10**6):
    return scan_documents(pieces(documents, size), split, part, lambda n: None)


def divided(documents, plan):
    """Return the bytes of each split in order, as the plan divides the documents."""
    fragments = []
    for number, document in enumerate(documents):
        edges = [0, *plan.cuts.get(number, ()), len(document)]
        fragments += [document[a:b] for a, b in pairwise(edges)]
    return [[fragments[i] for i in plan.fragments(split)] for split in SPLITS]


TEXTS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)


@given(TEXTS, st.randoms(), st.integers(1, 20))
def test_the_order_of_reading_and_the_piece_size_do_not_matter(documents, random, size):
    shuffled = random.sample(documents, len(documents))
    one = divided(documents, plan_splits(scan(documents), (0.1, 0.1)))
    other = divided(shuffled, plan_splits(scan(shuffled, size=size), (0.1, 0.1)))
    assert one == other


@given(TEXTS, st.sampled_from([(0.05, 0.05), (0.3, 0.1), (0.0, 0.2), (0.0, 0.0)]))
def test_every_byte_is_in_exactly_one_split(documents, shares):
    plan = plan_splits(scan(documents), shares)
    found = divided(documents, plan)
    together = b"".join(b"".join(split) for split in found)
    assert sorted(together) == sorted(b"".join(documents))
    assert sum(len(at) for at in plan.cuts.values()) <= 2
    for share, split in zip(shares, found[1:], strict=True):
        assert share > 0 or split == []


def test_documents_are_not_divided_if_there_are_enough():
    documents = [b"document %d" % i for i in range(1000)]
    plan = plan_splits(scan(documents), (0.05, 0.05))
    assert plan.cuts == {}
    assert [len(split) for split in divided(documents, plan)] == pytest.approx([900, 50, 50], abs=6)


def test_a_single_document_is_divided_at_the_exact_shares():
    document = bytes(range(100))
    plan = plan_splits(scan([document]), (0.05, 0.05))
    assert divided([document], plan) == [[document[:90]], [document[90:95]], [document[95:]]]
    assert plan.ends.tolist() == [False, False, True]


def test_given_edges_are_exact():
    document = bytes(range(100))
    plan = plan_splits(scan([document]), (0.05, 0.05), edges=(10, 30))
    assert divided([document], plan) == [[document[:10]], [document[10:30]], [document[30:]]]


def test_documents_of_a_given_split_stay_in_it():
    train, test = [b"train %d" % i for i in range(50)], [b"test %d" % i for i in range(3)]
    found = Scan.concatenate([scan(train), scan(test, "test")])
    plan = plan_splits(found, (0.1, 0.0))
    splits = divided([*train, *test], plan)
    assert sorted(splits[2]) == sorted(test)
    assert sorted(splits[0] + splits[1]) == sorted(train)
    assert len(splits[1]) == pytest.approx(5, abs=1)


def test_each_part_is_divided_on_its_own_and_stays_together():
    a, b = [b"a%03d" % i for i in range(100)], [b"b%03d" % i for i in range(900)]
    plan = plan_splits(Scan.concatenate([scan(a), scan(b, part=1)]), (0.1, 0.1))
    for split, share in zip(divided([*a, *b], plan), (0.8, 0.1, 0.1), strict=True):
        first = [document[:1] for document in split]
        assert first == sorted(first)
        assert first.count(b"a") == pytest.approx(100 * share, abs=2)
        assert first.count(b"b") == pytest.approx(900 * share, abs=18)


def test_a_scan_can_be_stored(tmp_path):
    found = scan([b"one", b"two"], "test", 3)
    found.save(tmp_path / "scan.npz")
    loaded = Scan.load(tmp_path / "scan.npz")
    for name, values in vars(found).items():
        np.testing.assert_array_equal(getattr(loaded, name), values)
        assert getattr(loaded, name).dtype == values.dtype
