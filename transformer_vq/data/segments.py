"""Text between reading and tokenizing: documents as fragments, fragments as segments."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.readers import Piece

SEGMENT = 1 << 16  # characters that are tokenized at once, about
MAX_SEGMENT = 1 << 24  # a text without usable line ends is divided here
LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")
"""Where text may be divided to learn a vocabulary, whose tokens do not span lines."""
_SPACES = np.zeros(256, dtype=bool)
_SPACES[list(b" \t\n\r\x0b\x0c")] = True


class Fragment(NamedTuple):
    """Consecutive bytes of a fragment, which `scan.Plan` numbers."""

    number: int
    data: bytes
    name: str
    """File that contains it, for messages."""


class Segment(NamedTuple):
    """Text that is tokenized at once; the tokens of a fragment are those of its segments."""

    fragment: int
    text: str


def cut_documents(
    pieces: Iterable[Piece],
    cuts: Mapping[int, tuple[int, ...]],
    whole_characters: bool,
) -> Iterator[Fragment]:
    """Yield the documents in order, divided at `cuts`.

    whole_characters: move a cut inside a UTF-8 character to its end.
    """
    number = document = -1
    offset = 0
    pending: list[int] = []
    for piece in pieces:
        if piece.starts_document:
            document += 1
            number += 1 + len(pending)  # a cut may have moved to the end of its document
            offset, pending = 0, list(cuts.get(document, ()))
        data = piece.data
        while pending and pending[0] < offset + len(data):
            at = pending[0] - offset
            if whole_characters and data[at] & 0xC0 == 0x80:
                pending[0] += 1
                continue
            if at:
                yield Fragment(number, data[:at], piece.name)
            data, offset = data[at:], pending.pop(0)
            number += 1
        if data:
            yield Fragment(number, data, piece.name)
        offset += len(data)


def segments(fragments: Iterable[Fragment], cuts: re.Pattern[str] | None) -> Iterator[Segment]:
    """Decode fragments and divide them into segments of about SEGMENT characters.

    cuts: where a text may be divided; None makes each fragment one segment.
    Raises DataError for text that is not UTF-8.
    """
    number, name, held = -1, "", ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for fragment in fragments:
        if fragment.number != number:
            yield from _end(decoder, number, held, name)
            held = ""
        number, name = fragment.number, fragment.name
        held += _decode(decoder, fragment.data, name)
        if cuts is not None:
            *ready, held = divide(held, SEGMENT, cuts)
            for text in ready:
                yield Segment(number, text)
    yield from _end(decoder, number, held, name)


def divide(text: str, limit: int, cuts: re.Pattern[str]) -> list[str]:
    """Divide a text at `cuts` into segments of at least `limit` characters; the rest is last."""
    found, start = [], 0
    while len(text) - start >= limit:
        match = cuts.search(text, start + limit)
        if match is not None:
            end = match.start()
        elif len(text) - start > MAX_SEGMENT:
            end = start + MAX_SEGMENT
        else:
            break
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def count_words(data: bytes, in_word: bool = False) -> tuple[int, bool]:
    """Count words separated by ASCII white space.

    in_word: whether the preceding data ended inside a word, which is not counted again.
    Returns the number of words and whether this data ends inside a word.
    """
    if not data:
        return 0, in_word
    spaces = _SPACES[np.frombuffer(data, dtype=np.uint8)]
    n_words = int(np.count_nonzero(spaces[:-1] & ~spaces[1:]))
    n_words += not (in_word or spaces[0])
    return n_words, not spaces[-1]


def unix_newlines(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Replace CRLF with LF, also where it is divided between two pieces; a single CR is kept."""
    held, starts, name = b"", False, ""
    for piece in pieces:
        if piece.starts_document and held:
            yield Piece(held, starts, name)
            held = b""
        data = held + piece.data
        starts, name = piece.starts_document or (starts and bool(held)), piece.name
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)].replace(b"\r\n", b"\n")
        if data:
            yield Piece(data, starts, name)
            starts = False
    if held:
        yield Piece(held, starts, name)


def _decode(decoder: codecs.IncrementalDecoder, data: bytes, name: str, final: bool = False) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 ({error.reason}); convert or remove it, or use "
            "--data.tokenizer bytes"
        ) from error


def _end(
    decoder: codecs.IncrementalDecoder, number: int, held: str, name: str
) -> Iterator[Segment]:
    """Yield the rest of a fragment."""
    held += _decode(decoder, b"", name, final=True)
    decoder.reset()
    if held:
        yield Segment(number, held)
