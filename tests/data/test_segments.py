"""Documents divided into fragments and segments: nothing is lost, whatever the piece size."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data import segments as module
from transformer_vq.data.segments import (
    Fragment,
    count_words,
    cut_documents,
    divide,
    segments,
    unix_newlines,
)
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.readers import Piece

CUTS = re.compile(r"(?<=\S\n)(?=\S)")
TEXT = st.text("ab \n\r\u00e9\u4e00\U0001f600", max_size=60)


def pieces(data, size):
    return [
        Piece(data[start : start + size], start == 0, "file") for start in range(0, len(data), size)
    ]


@given(st.lists(st.text("ab \n\t\r\x0b\x0c", max_size=6)))
def test_words_counted_in_chunks_match_the_complete_text(chunks):
    total, in_word = 0, False
    for chunk in chunks:
        n, in_word = count_words(chunk.encode(), in_word)
        total += n
    text = "".join(chunks)
    assert total == len(text.split())
    assert in_word == (text != "" and not text[-1].isspace())


@given(st.binary(), st.booleans())
def test_empty_data_does_not_end_a_word(data, in_word):
    assert count_words(b"", in_word) == (0, in_word)
    first = count_words(data, in_word)
    assert count_words(b"", first[1]) == (0, first[1])


def test_only_ascii_white_space_separates_words():
    assert count_words("a\u00a0b\u2003c \u3000".encode()) == (2, True)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.integers(1, 12))
def test_crlf_becomes_lf_wherever_pieces_end(documents, size):
    documents = [document for document in documents if document]
    found = []
    for piece in unix_newlines(p for document in documents for p in pieces(document, size)):
        assert piece.data
        if piece.starts_document:
            found.append(b"")
        found[-1] += piece.data
    assert found == [document.replace(b"\r\n", b"\n") for document in documents]


@given(st.binary(min_size=1, max_size=50), st.integers(1, 50), st.sets(st.integers(1, 49)))
def test_documents_are_cut_at_the_given_bytes(data, size, cuts):
    cuts = tuple(sorted(at for at in cuts if at < len(data)))
    found = {}
    for fragment in cut_documents(pieces(data, size), {0: cuts}, whole_characters=False):
        found[fragment.number] = found.get(fragment.number, b"") + fragment.data
    edges = [0, *cuts, len(data)]
    assert list(found.values()) == [data[a:b] for a, b in pairwise(edges)]


@given(TEXT, st.integers(1, 12), st.integers(1, 40))
def test_a_cut_inside_a_character_moves_to_its_end(text, size, at):
    data = text.encode()
    if at >= len(data):
        return
    found = {}
    for fragment in cut_documents(pieces(data, size), {0: (at,)}, whole_characters=True):
        found[fragment.number] = found.get(fragment.number, b"") + fragment.data
    assert b"".join(found.values()) == data
    first = found[0].decode()
    assert at <= len(first.encode()) < at + 4
    found.get(1, b"").decode()


def test_a_cut_inside_the_last_character_does_not_renumber_later_documents():
    documents = [Piece(text.encode(), True, "file") for text in ("a\u00e9", "b", "c")]
    found = [(x.number, x.data) for x in cut_documents(documents, {0: (2,)}, True)]
    assert found == [(0, "a\u00e9".encode()), (2, b"b"), (3, b"c")]


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 12))
def test_segments_give_the_text_again(texts, size, limit):
    texts = [text for text in texts if text]
    given_fragments = [
        Fragment(number, piece.data, "file")
        for number, text in enumerate(texts)
        for piece in pieces(text.encode(), size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT", limit)
        found = list(segments(given_fragments, CUTS))
    for number, text in enumerate(texts):
        own = [segment.text for segment in found if segment.fragment == number]
        assert "".join(own) == text
        for before, after in pairwise(own):
            assert before[-1] == "\n"
            assert not before[-2].isspace()
            assert not after[0].isspace()
    assert [s.text for s in segments(given_fragments, None)] == texts


def test_a_text_without_line_ends_is_divided_at_the_limit(monkeypatch):
    monkeypatch.setattr(module, "MAX_SEGMENT", 100)
    assert [len(part) for part in divide("x" * 250, 10, CUTS)] == [100, 100, 50]


@pytest.mark.parametrize("data", [b"caf\xe9 x", b"\xc3", b"ok \xff"])
def test_text_that_is_not_utf8_is_rejected_with_its_file(data):
    with pytest.raises(DataError, match="file is not UTF-8"):
        list(segments([Fragment(0, data, "file")], CUTS))
