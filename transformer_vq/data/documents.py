"""Documents of a source: read, hashed and tokenized in one pass, on all cores, in constant memory.

`tokenize` appends to two files: `tokens.bin` holds the tokens of all documents in the order in
which they are read, `documents.bin` a row of numbers about each document. If it is interrupted, the
next call continues after the last input file that is complete in both.

`divide_documents` sorts documents by their digest. The last bytes in this order are for test, those
before them for validation. The same documents therefore give the same splits, whatever format, file
or order they are stored in.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_vq.data.corpora import Source
from transformer_vq.data.corpus import TOKENS, token_dtype
from transformer_vq.data.images import image_edges
from transformer_vq.data.paths import SPLITS
from transformer_vq.data.text import reading
from transformer_vq.data.tokenizers import (
    CHUNK_CHARS,
    MAX_CHUNK_CHARS,
    ByteTokenizer,
    Tokenizer,
    divide,
)
from transformer_vq.progress import Advance, progress_bar, warn

DOCUMENTS = "documents.bin"
FREE = -1  # the split of documents that are divided by share
END = -1  # bytes of the row that marks the end of an input
BATCH_CHARS = 1 << 18  # tokenized in one call
N_BATCHES = 2  # tokenized at the same time: one may wait for Python while the other computes
FLUSH_TOKENS = 1 << 23
READ_TOKENS = 1 << 20  # to divide a document
EDGE_TOLERANCE = 0.25  # of the smaller of validation and test
CHECK_EVERY = 16  # chunks; the round trip of one of them is checked
_NOWHERE = re.compile("(?!)")
_SPACES = np.zeros(256, dtype=bool)
_SPACES[list(b" \t\n\r\x0b\x0c")] = True

ROW = np.dtype(
    [
        ("digest", "<u8"),  # hash of all bytes, by which documents are split and ordered
        ("offset", "<i8"),  # of the first token in tokens.bin
        ("tokens", "<i8"),  # including the end-of-document token
        ("bytes", "<i8"),  # END after the last document of an input
        ("words", "<i8"),
        ("file", "<i8"),  # number of the input
        ("split", "<i8"),  # index in SPLITS, or FREE
    ]
)
"""A document in documents.bin."""


class Chunk(NamedTuple):
    """Text that is tokenized at once; the tokens of a document are those of its chunks."""

    text: str | bytes
    row: np.ndarray | None = None
    """Of the document, in its last chunk; offset and tokens are not known yet."""


def read_chunks(
    source: Source,
    advance: Advance,
    cuts: re.Pattern[str] | None = None,
    *,
    as_bytes: bool = False,
    first: int = 0,
    splits: tuple[str | None, ...] = (None, *SPLITS),
) -> Iterator[Chunk]:
    """Yield the documents of all inputs from number `first` on, and a mark after each input.

    cuts: where a text may be divided; None divides only documents of more than MAX_CHUNK_CHARS
    characters, so that the memory is bounded. as_bytes: do not decode.
    splits: the splits of the inputs that are read.
    """
    nothing: str | bytes = b"" if as_bytes else ""
    for number, item in enumerate(source.inputs[first:], first):
        if item.split not in splits:
            continue
        split = FREE if item.split is None else SPLITS.index(item.split)
        with reading(item.path):
            for pieces in item.read():
                digest, n_bytes, n_words, in_word = hashlib.blake2b(digest_size=8), 0, 0, False
                decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
                for data in pieces:
                    digest.update(data)
                    more, in_word = count_words(data, in_word)
                    n_bytes, n_words = n_bytes + len(data), n_words + more
                    advance(len(data))
                    if as_bytes:
                        yield Chunk(data)
                        continue
                    held += decoder.decode(data)
                    if cuts is not None or len(held) > MAX_CHUNK_CHARS:
                        *ready, held = divide(held, CHUNK_CHARS, cuts or _NOWHERE)
                        yield from map(Chunk, ready)
                held += decoder.decode(b"", final=True)
                row = (int.from_bytes(digest.digest()), 0, 0, n_bytes, n_words, number, split)
                yield Chunk(nothing if as_bytes else held, np.array(row, ROW))
        yield Chunk(nothing, np.array((0, 0, 0, END, 0, number, split), ROW))


def count_words(data: bytes, in_word: bool = False) -> tuple[int, bool]:
    """Count words separated by ASCII white space.

    in_word: whether the preceding data ended inside a word, which is not counted again.
    Returns the number of words and whether this data ends inside a word.
    """
    if not data:
        return 0, in_word
    spaces = _SPACES[np.frombuffer(data, dtype=np.uint8)]
    n_words = int(np.count_nonzero(spaces[:-1] & ~spaces[1:]))
    return n_words + (not (in_word or spaces[0])), not spaces[-1]


def tokenize(source: Source, tokenizer: Tokenizer, work: Path) -> np.ndarray:
    """Write the tokens of all documents, and return their rows, [m] of ROW."""
    dtype = np.dtype(token_dtype(source.vocab_size))
    eod = np.array([] if tokenizer.eod is None else [tokenizer.eod], dtype=dtype)
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    n_documents = n_empty = n_chunks = is_lossy = 0
    first, n_tokens = _resume(work, dtype.itemsize)
    n_flushed, start, rows = n_tokens, n_tokens, bytearray()  # rows are not written yet
    with (
        open(work / TOKENS, "ab") as tokens_file,
        open(work / DOCUMENTS, "ab") as rows_file,
        progress_bar(f"preparing {source.dataset}", None, "B") as advance,
    ):

        def flush() -> None:
            """Write to the disk, tokens first: a row stands for tokens that exist."""
            tokens_file.flush()
            os.fsync(tokens_file.fileno())
            rows_file.write(rows)
            rows_file.flush()
            os.fsync(rows_file.fileno())
            rows.clear()

        chunks = read_chunks(source, advance, tokenizer.cuts, as_bytes=is_bytes, first=first)
        try:
            for (text, row), tokens in _encode(chunks, tokenizer):
                if not is_bytes and n_chunks % CHECK_EVERY == 0 and text:
                    is_lossy |= tokenizer.decode(tokens.tolist()) != str(text).encode()
                n_chunks += 1
                if row is not None and row["bytes"] > 0:
                    tokens = np.concatenate([tokens, eod])
                tokens_file.write(tokens.astype(dtype, copy=False).tobytes())
                n_tokens += len(tokens)
                if row is not None:
                    n_documents += row["bytes"] != END
                    n_empty += row["bytes"] == 0
                    row["offset"], row["tokens"] = start, n_tokens - start
                    start = n_tokens
                    rows += row.tobytes() if row["bytes"] else b""
                if n_tokens - n_flushed >= FLUSH_TOKENS:
                    flush()
                    n_flushed = n_tokens
        finally:
            flush()
    if n_empty and not source.has_images:
        warn(f"{n_empty:,} of {n_documents:,} documents are empty and were skipped")
    if is_lossy:
        warn("the tokenizer changes the text; bits per byte still refer to the original bytes")
    found = np.fromfile(work / DOCUMENTS, ROW)
    return found[found["tokens"] > 0]


def _resume(work: Path, token_bytes: int) -> tuple[int, int]:
    """Remove input files that are incomplete; return the next input and the number of tokens."""
    tokens, documents = work / TOKENS, work / DOCUMENTS
    rows = np.fromfile(documents, ROW) if documents.is_file() else np.zeros(0, ROW)
    marks = np.flatnonzero(rows["bytes"] == END)
    rows = rows[: marks[-1] + 1] if len(marks) else rows[:0]
    n_tokens = int(rows["tokens"].sum())
    if not tokens.is_file() or tokens.stat().st_size < n_tokens * token_bytes:
        rows, n_tokens = rows[:0], 0
    for path, size in ((documents, rows.nbytes), (tokens, n_tokens * token_bytes)):
        path.touch()
        os.truncate(path, size)
    return int(rows["file"][-1]) + 1 if len(rows) else 0, n_tokens


def _encode(chunks: Iterable[Chunk], tokenizer: Tokenizer) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Tokenize chunks in order, in batches, a few batches ahead; tokenizers release the GIL."""
    if isinstance(tokenizer, ByteTokenizer):
        for chunk in chunks:
            assert isinstance(chunk.text, bytes)
            yield chunk, np.frombuffer(chunk.text, dtype=np.uint8)
        return
    waiting: deque[tuple[list[Chunk], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(N_BATCHES) as pool:
        for batch in _batches(chunks):
            texts = [str(chunk.text) for chunk in batch]
            waiting.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            if len(waiting) > N_BATCHES:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def find_edges(source: Source, sizes: np.ndarray) -> tuple[int, int]:
    """Return where validation and test start, in bytes. sizes: of all documents, in their order.

    An edge moves to a boundary between two documents if one is close; else it divides a document.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    if source.dataset == "images":
        return image_edges(len(sizes))
    validation, test = source.shares
    tolerance = EDGE_TOLERANCE * min((x for x in source.shares if x > 0), default=0.0) * total
    found = []
    for edge in (round(total * (1 - validation - test)), round(total * (1 - test))):
        i = int(np.searchsorted(ends, edge))
        nearest = min(ends[max(i - 1, 0) : i + 1].tolist(), key=lambda end: abs(end - edge))
        found.append(nearest if abs(nearest - edge) <= tolerance else edge)
    return found[0], found[1]


def training_bytes(source: Source, rows: np.ndarray) -> np.ndarray:
    """Return how many bytes of each document belong to the training split, [m]."""
    training = rows["bytes"].copy()
    free = np.flatnonzero((rows["split"] == FREE) & (training > 0))
    free = free[np.argsort(rows["digest"][free], kind="stable")]
    if len(free):
        sizes = training[free]
        edge = find_edges(source, sizes)[0]
        training[free] = np.clip(edge - (np.cumsum(sizes) - sizes), 0, sizes)
    return training


def divide_documents(
    source: Source, tokenizer: Tokenizer, rows: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the rows with their splits, ordered by split and digest; one at an edge is divided.

    tokens: of all documents.
    """
    free = rows[rows["split"] == FREE]
    free = free[np.argsort(free["digest"], kind="stable")]
    if len(free):
        edges = find_edges(source, free["bytes"])
        free["split"] = 0
        for split, edge in enumerate(edges, start=1):
            ends = np.cumsum(free["bytes"])
            i = int(np.searchsorted(ends, edge, side="right"))  # the document with the edge
            n_before = edge - int(ends[i - 1]) if i else edge
            if i < len(free) and n_before > 0:
                parts = _cut(free[i], n_before, tokenizer, tokens)
                free = np.concatenate([free[:i], parts, free[i + 1 :]])
                i += 1
            free["split"][i:] = split
    rows = np.concatenate([rows[rows["split"] != FREE], free])
    return rows[np.lexsort((rows["offset"], rows["digest"], rows["split"]))]


def _cut(row: np.void, at: int, tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Divide a document after `at` bytes: return the rows of its start and its end.

    It is divided between two tokens, so the start may be longer, and there may be no end.
    """
    n_tokens = n_bytes = n_words = 0
    in_word = False
    while n_bytes < at and n_tokens < row["tokens"]:
        first = int(row["offset"]) + n_tokens
        some = tokens[first : first + min(READ_TOKENS, int(row["tokens"]) - n_tokens)].tolist()
        if isinstance(tokenizer, ByteTokenizer):
            sums = np.arange(1, len(some) + 1)
        else:
            sums = np.cumsum([len(tokenizer.decode([token])) for token in some])
        n = min(int(np.searchsorted(sums, at - n_bytes)) + 1, len(some))
        more, in_word = count_words(tokenizer.decode(some[:n]), in_word)
        n_tokens, n_bytes, n_words = n_tokens + n, n_bytes + int(sums[n - 1]), n_words + more
    if n_bytes >= row["bytes"]:
        return np.array([row])
    start, end = row.copy(), row.copy()
    for name, value in (("tokens", n_tokens), ("bytes", n_bytes), ("words", n_words)):
        start[name] = min(value, row[name])
        end[name] -= start[name]
    end["offset"] += n_tokens
    return np.array([start, end])
