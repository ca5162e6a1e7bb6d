"""Documents of a source: read, hashed and tokenized in one pass, on all cores, in constant memory.

`tokenize` appends to two files: `tokens.bin` holds the tokens of all documents in the order in
which they are read, `documents.bin` a row of numbers about each document. If it is interrupted, the
next call continues after the last input file that is complete in both.
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
from transformer_vq.data.paths import SPLITS, DataError
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
BATCH_CHARS = 1 << 18  # tokenized in one call
N_BATCHES = 2  # tokenized at the same time: one may wait for Python while the other computes
FLUSH_TOKENS = 1 << 23
CHECK_EVERY = 16  # chunks; the round trip of one of them is checked
_NOWHERE = re.compile("(?!)")
_SPACES = np.zeros(256, dtype=bool)
_SPACES[list(b" \t\n\r\x0b\x0c")] = True

ROW = np.dtype(
    [
        ("digest", "<u8"),  # hash of all bytes, by which documents are split and ordered
        ("offset", "<i8"),  # of the first token in tokens.bin
        ("tokens", "<i8"),  # including the end-of-document token
        ("bytes", "<i8"),
        ("words", "<i8"),
        ("file", "<i8"),  # number of the input
        ("split", "<i8"),  # index in SPLITS, or FREE
    ]
)
"""A document in documents.bin. A row without tokens marks the end of an input file."""


class Document:
    """A document while it is read: the numbers of its row."""

    def __init__(self, file: int, split: int, ends_file: bool = False) -> None:
        self.file, self.split = file, split
        self.ends_file = ends_file
        """Whether this is the mark after the last document of a file."""
        self.digest = self.offset = self.tokens = self.bytes = self.words = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._in_word = False

    def add(self, data: bytes) -> None:
        """Count and hash the next bytes."""
        self._hash.update(data)
        self.digest = int.from_bytes(self._hash.digest())
        self.bytes += len(data)
        n_words, self._in_word = count_words(data, self._in_word)
        self.words += n_words

    def row(self) -> tuple[int, ...]:
        assert ROW.names is not None
        return tuple(getattr(self, name) for name in ROW.names)


class Chunk(NamedTuple):
    """Text that is tokenized at once; the tokens of a document are those of its chunks."""

    document: Document
    text: str | bytes
    ends: bool
    """Whether this is the last chunk; its document is then complete."""


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
    for number, item in enumerate(source.inputs[first:], first):
        if item.split not in splits:
            continue
        split = FREE if item.split is None else SPLITS.index(item.split)
        with reading(item.path):
            for pieces in item.read():
                document, held = Document(number, split), ""
                decoder = codecs.getincrementaldecoder("utf-8")()
                for data in pieces:
                    document.add(data)
                    advance(len(data))
                    if as_bytes:
                        yield Chunk(document, data, False)
                        continue
                    held += _decode(decoder, data, item.path)
                    if cuts is not None or len(held) > MAX_CHUNK_CHARS:
                        *ready, held = divide(held, CHUNK_CHARS, cuts or _NOWHERE)
                        for text in ready:
                            yield Chunk(document, text, False)
                held += _decode(decoder, b"", item.path, final=True)
                yield Chunk(document, b"" if as_bytes else held, True)
        yield Chunk(Document(number, split, ends_file=True), b"" if as_bytes else "", True)


def _decode(decoder: codecs.IncrementalDecoder, data: bytes, path: str, final: bool = False) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 ({error.reason}); convert or remove it, or use "
            "--data.tokenizer bytes"
        ) from error


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


def tokenize(source: Source, tokenizer: Tokenizer, work: Path) -> np.ndarray:
    """Write the tokens of all documents, and return their rows, [m] of ROW."""
    dtype = np.dtype(token_dtype(source.vocab_size))
    eod = np.array([] if tokenizer.eod is None else [tokenizer.eod], dtype=dtype)
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    n_documents = n_empty = n_chunks = n_checked = n_lossy = n_unwritten = 0
    first, n_tokens = _resume(work, dtype.itemsize)
    rows = list[tuple[int, ...]]()
    with (
        open(work / TOKENS, "ab") as tokens_file,
        open(work / DOCUMENTS, "ab") as rows_file,
        progress_bar(f"preparing {source.dataset}", None, "B") as advance,
    ):

        def flush() -> None:
            """Write to the disk, tokens first: a row stands for tokens that exist."""
            tokens_file.flush()
            os.fsync(tokens_file.fileno())
            rows_file.write(np.array(rows, dtype=ROW).tobytes())
            rows_file.flush()
            os.fsync(rows_file.fileno())
            rows.clear()

        chunks = read_chunks(source, advance, tokenizer.cuts, as_bytes=is_bytes, first=first)
        try:
            for (document, text, ends), tokens in _encode(chunks, tokenizer):
                if not is_bytes and n_chunks % CHECK_EVERY == 0 and text:
                    n_checked += 1
                    n_lossy += tokenizer.decode(tokens.tolist()) != str(text).encode()
                n_chunks += 1
                if ends and document.bytes:
                    tokens = np.concatenate([tokens, eod])
                tokens_file.write(tokens.astype(dtype, copy=False).tobytes())
                document.tokens += len(tokens)
                n_tokens += len(tokens)
                n_unwritten += len(tokens)
                if ends:
                    n_documents += not document.ends_file
                    n_empty += not document.bytes and not document.ends_file
                    document.offset = n_tokens - document.tokens
                    if document.bytes or document.ends_file:
                        rows.append(document.row())
                if n_unwritten >= FLUSH_TOKENS:
                    flush()
                    n_unwritten = 0
        finally:
            flush()
    if n_empty and not source.has_images:
        warn(f"{n_empty:,} of {n_documents:,} documents are empty and were skipped")
    if n_lossy:
        warn(
            f"the tokenizer changes the text: {n_lossy / n_checked:.1%} of the checked chunks "
            "differ after decoding; bits per byte still refer to the original bytes"
        )
    found = np.fromfile(work / DOCUMENTS, ROW)
    return found[found["tokens"] > 0]


def _resume(work: Path, token_bytes: int) -> tuple[int, int]:
    """Remove input files that are incomplete; return the next input and the number of tokens."""
    tokens, documents = work / TOKENS, work / DOCUMENTS
    rows = np.fromfile(documents, ROW) if documents.is_file() else np.zeros(0, ROW)
    marks = np.flatnonzero(rows["tokens"] == 0)
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
