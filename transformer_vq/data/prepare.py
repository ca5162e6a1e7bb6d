"""Prepare a corpus in one pass: documents are read, hashed and tokenized, and tokens written once.

Documents are split by a hash of their content, not by file name or position. The same documents
therefore give the same tokens in every split, whatever format, file or order they are stored in.
The order of a split is a sort of its index; tokens stay where they were written.

A corpus is prepared in a work folder, which is renamed when it is complete. `tokens.bin` and
`documents.bin` grow as documents are read. After an interruption, the next preparation continues
after the last input file that is complete in them. The work folder is locked by an open file
descriptor, so the lock is released however its process ends.
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_vq.config import DataConfig
from transformer_vq.data.bpe import LINE_STARTS, MAX_CHARS, learn_bpe
from transformer_vq.data.corpora import Source, find_source
from transformer_vq.data.corpus import (
    FORMAT,
    META,
    TOKENS,
    Corpus,
    SplitSize,
    read_corpus,
    token_dtype,
)
from transformer_vq.data.paths import SPLITS, DataError, error_reason, expand_user
from transformer_vq.data.text import CHUNK, store_stdin
from transformer_vq.data.tokenizers import (
    SEGMENT,
    ByteTokenizer,
    Tokenizer,
    divide,
    load_tokenizer,
)
from transformer_vq.errors import UserError
from transformer_vq.files import CorruptFileError, atomic_folder, write_json, write_manifest
from transformer_vq.progress import Advance, Reporter, info, progress_bar, reporting, warn

# Bytes without and with an end-of-document token: the defaults of the presets. They do not count as
# chosen by the user, so any tokenizer replaces them.
BYTE_VOCAB_SIZES = (256, 257)
BATCH_CHARS = 1 << 18  # tokenized in one call
N_BATCHES = 2  # tokenized at the same time: one may wait for Python while the other computes
FLUSH_TOKENS = 1 << 23
CHECK_EVERY = 16  # segments; the round trip of one of them is checked
FREE = -1  # the split of documents that are divided by share
EDGE_TOLERANCE = 0.25  # of the smaller of validation and test
OPTIMISTIC = 0.9  # of the training share, by hash; its documents are almost surely training ones
_DOCUMENTS = "documents.bin"
_SPACES = np.zeros(256, dtype=bool)
_SPACES[list(b" \t\n\r\x0b\x0c")] = True

ROW = np.dtype(
    [
        ("head", "<u8"),  # hash of the first CHUNK bytes, by which documents are split
        ("digest", "<u8"),  # hash of all bytes, by which the documents of a split are ordered
        ("offset", "<i8"),  # of the first token in tokens.bin
        ("tokens", "<i8"),  # including the end-of-document token
        ("bytes", "<i8"),
        ("words", "<i8"),
        ("file", "<i8"),  # number of the input
        ("split", "<i8"),  # index in SPLITS, or FREE
    ]
)
"""A document in documents.bin. A row without tokens marks the end of an input file."""


def prepare(
    config: DataConfig, vocab_size: int | None = None, *, reporter: Reporter | None = None
) -> Corpus:
    """Return the corpus that a config names; create it in its cache folder if necessary.

    The corpus is reused by later calls until the data changes. A corrupt corpus is created again,
    with a warning. Several processes may prepare the same data at the same time.

    config: the dataset, its path, an optional vocabulary file, and the cache folder.
    vocab_size: the vocabulary size of the model, which the data must match. It is also the size of
        a vocabulary that must be learned. None accepts any size.
    reporter: receives progress and warnings; None keeps the current reporter.

    Raises DataError, with a message of one line, if the data is missing, unreadable, empty or does
    not match `vocab_size`, or if the cache cannot be written.
    """
    with reporting(reporter):
        cache = expand_user(config.cache_folder, "--data.cache")
        config = store_stdin(config, cache)
        wanted = None if vocab_size in BYTE_VOCAB_SIZES else vocab_size
        source = find_source(config, wanted)
        if vocab_size not in (None, *BYTE_VOCAB_SIZES, source.vocab_size):
            raise DataError(
                f"{config.dataset} has a vocabulary of {source.vocab_size:,} tokens, but the model "
                f"expects {vocab_size:,}; set --model.vocab-size to {source.vocab_size}"
            )
        fingerprint = json.dumps([FORMAT, source.fingerprint()])
        digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        folder = cache / f"{config.dataset}-{digest}"
        with suppress(FileNotFoundError, CorruptFileError):
            return read_corpus(folder)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _work_folder(folder) as work:
                if os.path.lexists(folder):
                    try:
                        return read_corpus(folder)  # another process has created it meanwhile
                    except CorruptFileError as error:
                        warn(f"{folder} is corrupt ({error}); preparing it again")
                        _delete(folder)
                _create(source, work)
                if json.dumps([FORMAT, source.fingerprint()]) != fingerprint:
                    raise DataError(
                        f"the files of {config.dataset} changed while they were read; run the "
                        "command again"
                    )
                os.replace(work, folder)
        except OSError as error:
            raise DataError(
                f"cannot write to {cache}: {error_reason(error)}; free disk space or use another "
                "--data.cache"
            ) from error
        return Corpus.open(folder)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Yield a locked folder next to `folder`; wait while another process holds the lock.

    It is kept if the block is interrupted, and deleted if the data cannot be used.
    """
    work = folder.with_name(f".{folder.name}.work")
    while True:
        work.mkdir(exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    info("another process is preparing the same data; waiting for it")
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), work.stat()):
                    yield work
                    return
            # The process that held the lock has renamed or deleted the folder.
        except UserError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            with suppress(OSError):
                work.rmdir()  # only if it is empty
            os.close(descriptor)


def _create(source: Source, work: Path) -> None:
    """Write all files of a corpus to the work folder; resume what is already in it."""
    tokenizer = source.tokenizer or _learn(source, work)
    _tokenize(source, tokenizer, work)
    rows = np.fromfile(work / _DOCUMENTS, ROW)
    rows = rows[rows["tokens"] > 0]
    if not len(rows):
        raise DataError(_no_text(source))
    source.check_size(int(rows["bytes"].sum()))
    splits = _divide(source, tokenizer, rows, work)
    sizes = {}
    identity = hashlib.sha256(repr((tokenizer.sha256, tokenizer.bos, tokenizer.eod)).encode())
    for name in source.splits:
        found = splits[SPLITS.index(name)]
        if not len(found):
            raise DataError(
                f"the {name} split of {source.dataset} would be empty: {rows['bytes'].sum():,} "
                f"bytes are too few for {', '.join(source.splits)}; use more data"
            )
        starts = np.cumsum(found["tokens"]) - found["tokens"]
        np.save(work / f"{name}.npy", np.stack([starts, found["offset"]]))
        identity.update(np.stack([found["digest"].view("<i8"), starts, found["bytes"]]).tobytes())
        n_words = None if source.has_images else int(found["words"].sum())
        n_tokens, n_bytes = int(found["tokens"].sum()), int(found["bytes"].sum())
        sizes[name] = SplitSize(n_tokens, len(found), n_bytes, n_words)
    tokenizer.save(work)
    shutil.rmtree(work / "tokenizer", ignore_errors=True)
    (work / _DOCUMENTS).unlink()
    meta = {
        "format": FORMAT,
        "dataset": source.dataset,
        "vocab_size": source.vocab_size,
        "bos": tokenizer.bos,
        "sha256": identity.hexdigest(),
        "tokenizer_sha256": tokenizer.sha256,
        "end_of_document": source.ends_documents,
        "splits": {name: vars(size) for name, size in sizes.items()},
    }
    write_json(work / META, meta)
    write_manifest(work)


def _no_text(source: Source) -> str:
    paths = [item.path for item in source.inputs]
    if len(paths) == 1:
        return f"{paths[0]} is empty; give another file"
    return f"all {len(paths):,} files are empty, for example {paths[0]}; give other files"


class Document:
    """A document while it is read: the fields of its row, and text that is not tokenized yet."""

    def __init__(self, file: int, split: int, start: bytes = b"") -> None:
        """start: the first piece, with at least CHUNK bytes unless the document is shorter."""
        self.file, self.split = file, split
        self.head = _key(hashlib.blake2b(start[:CHUNK], digest_size=8))
        self.digest = self.n_bytes = self.n_words = self.n_tokens = 0
        self.held = ""
        self._hash = hashlib.blake2b(digest_size=8)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._in_word = False

    def add(self, data: bytes) -> None:
        """Count and hash the next bytes."""
        self._hash.update(data)
        self.digest = _key(self._hash)
        self.n_bytes += len(data)
        n_words, self._in_word = count_words(data, self._in_word)
        self.n_words += n_words

    def decode(self, data: bytes, path: str, final: bool = False) -> None:
        """Hold the text of the next bytes. Raises DataError if they are not UTF-8."""
        try:
            self.held += self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 ({error.reason}); convert or remove it, or use "
                "--data.tokenizer bytes"
            ) from error


def _key(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest())


class Segment(NamedTuple):
    """Text that is tokenized at once; the tokens of a document are those of its segments."""

    document: Document
    text: str | bytes
    """Bytes for a ByteTokenizer."""
    ends: bool
    """Whether this is the end of its document."""


def read_segments(
    source: Source,
    cuts: re.Pattern[str] | None,
    advance: Advance,
    first: int = 0,
    splits: tuple[str | None, ...] = (None, *SPLITS),
    as_bytes: bool = False,
) -> Iterator[Segment]:
    """Yield the documents of all inputs from number `first` on, divided into segments.

    A document is complete when the segment that ends it is yielded. An empty document is one
    segment. The end of an input is the segment of a document with a head of 0 and no bytes.
    cuts: where a text may be divided; None makes each document one segment.
    splits: the splits of the inputs that are read.
    """
    for number, item in enumerate(source.inputs[first:], first):
        if item.split not in splits:
            continue
        split = FREE if item.split is None else SPLITS.index(item.split)
        document: Document | None = None
        for piece in item.read():
            if piece.starts_document:
                if document is not None:
                    yield _end(document, item.path, as_bytes)
                document = Document(number, split, piece.data)
            assert document is not None, "the first piece starts a document"
            document.add(piece.data)
            advance(len(piece.data))
            if as_bytes:
                yield Segment(document, piece.data, False)
                continue
            document.decode(piece.data, item.path)
            if cuts is not None:
                *ready, document.held = divide(document.held, SEGMENT, cuts)
                for text in ready:
                    yield Segment(document, text, False)
        if document is not None:
            yield _end(document, item.path, as_bytes)
        end = Document(number, split)
        end.head = 0
        yield Segment(end, b"" if as_bytes else "", True)


def _end(document: Document, path: str, as_bytes: bool) -> Segment:
    if as_bytes:
        return Segment(document, b"", True)
    document.decode(b"", path, final=True)
    return Segment(document, document.held, True)


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


def _tokenize(source: Source, tokenizer: Tokenizer, work: Path) -> None:
    """Write the tokens of all documents, and a row for each; the rows of complete files remain."""
    dtype = token_dtype(source.vocab_size)
    first, n_tokens = _resume(work, np.dtype(dtype).itemsize)
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    eod = np.array([] if tokenizer.eod is None else [tokenizer.eod], dtype=dtype)
    rows = list[tuple[int, ...]]()
    n_checked = n_lossy = n_seen = n_documents = n_empty = 0
    what = f"preparing {source.dataset}"
    with (
        open(work / TOKENS, "ab") as file,
        open(work / _DOCUMENTS, "ab") as index,
        progress_bar(what, None, "B") as advance,
    ):

        def flush() -> None:
            for stream in (file, index):  # tokens first: a row stands for tokens that exist
                if stream is index:
                    index.write(np.array(rows, dtype=ROW).tobytes())
                    rows.clear()
                stream.flush()
                os.fsync(stream.fileno())

        found = read_segments(source, tokenizer.cuts, advance, first, as_bytes=is_bytes)
        n_flushed = n_tokens
        try:
            for segment, tokens in _encode(found, tokenizer):
                document = segment.document
                if not is_bytes and n_seen % CHECK_EVERY == 0 and segment.text:
                    n_checked += 1
                    n_lossy += tokenizer.decode(tokens.tolist()) != str(segment.text).encode()
                n_seen += 1
                if segment.ends and document.n_bytes:
                    tokens = np.concatenate([tokens, eod])
                file.write(tokens.astype(dtype, copy=False).tobytes())
                document.n_tokens += len(tokens)
                n_tokens += len(tokens)
                if segment.ends and (document.n_bytes or not document.head):
                    rows.append(_row(document, n_tokens - document.n_tokens))
                n_documents += segment.ends and document.head > 0
                n_empty += segment.ends and document.head > 0 and not document.n_bytes
                if n_tokens - n_flushed >= FLUSH_TOKENS:
                    flush()
                    n_flushed = n_tokens
        finally:
            flush()
    if n_empty and not source.has_images:
        warn(f"{n_empty:,} of {n_documents:,} documents are empty and were skipped")
    if n_lossy:
        warn(
            f"the tokenizer changes the text: {n_lossy / n_checked:.1%} of the checked segments "
            "differ after decoding; bits per byte still refer to the original bytes"
        )


def _row(document: Document, offset: int) -> tuple[int, ...]:
    x = document
    return x.head, x.digest, offset, x.n_tokens, x.n_bytes, x.n_words, x.file, x.split


def _resume(work: Path, token_bytes: int) -> tuple[int, int]:
    """Remove input files that are incomplete; return the next input and the number of tokens."""
    tokens, documents = work / TOKENS, work / _DOCUMENTS
    if not (tokens.is_file() and documents.is_file()):
        tokens.unlink(missing_ok=True)
        documents.unlink(missing_ok=True)
        return 0, 0
    rows = np.fromfile(documents, ROW)
    marks = np.flatnonzero(rows["tokens"] == 0)
    n_rows = int(marks[-1]) + 1 if len(marks) else 0
    n_tokens = int(rows["tokens"][:n_rows].sum())
    if tokens.stat().st_size < n_tokens * token_bytes:
        n_rows = n_tokens = 0
    os.truncate(documents, n_rows * ROW.itemsize)
    os.truncate(tokens, n_tokens * token_bytes)
    return int(rows["file"][n_rows - 1]) + 1 if n_rows else 0, n_tokens


def _encode(found: Iterable[Segment], tokenizer: Tokenizer) -> Iterator[tuple[Segment, np.ndarray]]:
    """Tokenize segments in batches, on all cores, in order."""
    if isinstance(tokenizer, ByteTokenizer):
        for segment in found:
            assert isinstance(segment.text, bytes)
            yield segment, np.frombuffer(segment.text, dtype=np.uint8)
        return

    def encode(batch: list[Segment]) -> list[np.ndarray]:
        return tokenizer.encode_batch([str(segment.text) for segment in batch])

    for batch, tokens in _map_ahead(encode, _batches(found)):
        yield from zip(batch, tokens, strict=True)


def _batches(found: Iterable[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    size = 0
    for segment in found:
        batch.append(segment)
        size += len(segment.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _map_ahead(
    encode: Callable[[list[Segment]], list[np.ndarray]], batches: Iterable[list[Segment]]
) -> Iterator[tuple[list[Segment], list[np.ndarray]]]:
    """Apply a function to batches in threads, a few batches ahead; tokenizers release the GIL."""
    waiting: deque[tuple[list[Segment], Future[list[np.ndarray]]]] = deque()
    pool = ThreadPoolExecutor(N_BATCHES)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) > N_BATCHES:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _find_edges(source: Source, sizes: np.ndarray) -> tuple[int, int]:
    """Return where validation and test start, in bytes. sizes: of all documents, in their order.

    An edge moves to the nearest boundary between two documents if there is one close to it.
    Otherwise it divides a document.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    known = source.find_edges(len(sizes), total)
    if known is not None:
        return known
    shares = source.shares
    tolerance = EDGE_TOLERANCE * min((x for x in shares if x > 0), default=0.0) * total
    found = []
    for edge in (round(total * (1 - shares[0] - shares[1])), round(total * (1 - shares[1]))):
        i = int(np.searchsorted(ends, edge))
        near = [int(end) for end in ends[max(i - 1, 0) : i + 1]]
        nearest = min(near, key=lambda end: abs(end - edge))
        found.append(nearest if abs(nearest - edge) <= tolerance else edge)
    return found[0], found[1]


def _divide(
    source: Source, tokenizer: Tokenizer, rows: np.ndarray, work: Path
) -> dict[int, np.ndarray]:
    """Return the rows of each split in order; a row at an edge is divided."""
    free = rows[rows["split"] == FREE]
    free = free[np.lexsort((free["digest"], free["head"]))]
    if len(free):
        edges = _find_edges(source, free["bytes"])
        ends = np.cumsum(free["bytes"])
        starts = ends - free["bytes"]
        free["split"] = np.searchsorted(edges, starts, side="right")
        parts = [rows[rows["split"] != FREE]]
        for split, edge in enumerate(edges, start=1):
            i = int(np.searchsorted(ends, edge, side="right"))
            if i < len(free) and starts[i] < edge:
                at = edge - int(starts[i])
                _cut_row(free[i : i + 1], parts, at, split, source, tokenizer, work)
        rows = np.concatenate([*parts, free])
        rows = rows[rows["tokens"] > 0]
    order = np.lexsort((rows["offset"], rows["digest"], rows["split"]))
    rows = rows[order]
    return {split: rows[rows["split"] == split] for split in range(len(SPLITS))}


def _cut_row(
    row: np.ndarray,
    parts: list[np.ndarray],
    at: int,
    split: int,
    source: Source,
    tokenizer: Tokenizer,
    work: Path,
) -> None:
    """Divide a document of [1] rows after `at` bytes: its start goes to parts, its end to a split.

    It is divided between two tokens, so the start may be a few bytes longer.
    """
    # A document may be divided twice; then the first part of it is already in `parts`.
    done = sum(int(x["bytes"][0]) for x in parts[1:] if x["digest"] == row["digest"])
    start, at = row.copy(), at - done
    dtype = np.dtype(token_dtype(source.vocab_size))
    n_tokens = n_bytes = n_words = 0
    in_word = False
    with open(work / TOKENS, "rb") as file:
        file.seek(int(row["offset"][0]) * dtype.itemsize)
        while n_bytes < at and n_tokens < row["tokens"][0]:
            limit = min(CHUNK, int(row["tokens"][0]) - n_tokens)
            tokens = np.fromfile(file, dtype, limit)
            if isinstance(tokenizer, ByteTokenizer):
                lengths = np.ones(len(tokens), dtype=np.int64)
            else:
                texts = (len(tokenizer.decode([token])) for token in tokens.tolist())
                lengths = np.fromiter(texts, np.int64, len(tokens))
            sums = np.cumsum(lengths)
            n = min(int(np.searchsorted(sums, at - n_bytes)) + 1, len(tokens))
            more, in_word = count_words(tokenizer.decode(tokens[:n].tolist()), in_word)
            n_tokens, n_bytes, n_words = n_tokens + n, n_bytes + int(sums[n - 1]), n_words + more
    for name, value in (("tokens", n_tokens), ("bytes", n_bytes), ("words", n_words)):
        start[name] = np.minimum(value, row[name])
        row[name] -= start[name]
    row["offset"] += n_tokens
    row["split"] = split
    parts.append(start)


def _learn(source: Source, work: Path) -> Tokenizer:
    """Learn a vocabulary from the training documents, unless that is already done.

    Which documents are training ones is known only when all have been read. So the vocabulary is
    first learned from those with a low hash, almost surely training documents, while all of them
    are measured. With few documents or very much text that may be wrong. Then the documents are
    read again, and the vocabulary is learned from those that the measurement selects.
    """
    folder = work / "tokenizer"
    if not folder.is_dir():
        training = _TrainingText(source)
        with atomic_folder(folder) as partial:
            try:
                learn_bpe(training.guess(), source.vocab_size, partial)
            except _WrongGuessError:
                learn_bpe(training.select(), source.vocab_size, partial)
    return load_tokenizer(folder, end_of_document=source.ends_documents)


class _WrongGuessError(Exception):
    """The vocabulary would be learned from other documents than the training ones."""


class _TrainingText:
    """The text that a vocabulary is learned from."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._limits = np.zeros(0, dtype=np.int64)

    def guess(self) -> Iterator[str]:
        """Yield documents with a low hash while all are measured.

        Raises _WrongGuessError at the end if these are not training documents, or not enough.
        """
        highest = OPTIMISTIC * (1 - sum(self._source.shares)) * 2**64
        if not any(self._source.shares):
            highest = 2**64
        rows, fed, n_chars = list[tuple[int, ...]](), list[bool](), 0
        for segment in self._segments():
            document = segment.document
            is_fed = document.split != FREE or document.head < highest
            if is_fed and n_chars <= MAX_CHARS:
                n_chars += len(segment.text)
                yield str(segment.text)
            if segment.ends and document.n_bytes:
                rows.append(_row(document, 0))
                fed.append(is_fed)
        if not rows:
            raise DataError(_no_text(self._source))
        found, was_fed = np.array(rows, dtype=ROW), np.array(fed)
        training = self._training_bytes(found)
        n_fed = int(found["bytes"][was_fed].sum())
        is_right = bool((training[was_fed] == found["bytes"][was_fed]).all())
        if not is_right or n_chars > MAX_CHARS or n_fed < training.sum() / 2:
            order = np.lexsort((found["digest"], found["head"]))
            before = np.cumsum(training[order]) - training[order]
            self._limits = np.zeros(len(found), dtype=np.int64)
            self._limits[order] = np.clip(MAX_CHARS - before, 0, training[order])
            raise _WrongGuessError

    def select(self) -> Iterator[str]:
        """Yield the training part of each document, in all at most MAX_CHARS bytes."""
        number, n_bytes = 0, 0
        for segment in self._segments():
            if segment.document.n_bytes == 0:
                continue  # the end of an input
            data = str(segment.text).encode()[: max(int(self._limits[number]) - n_bytes, 0)]
            n_bytes += len(data)
            yield data.decode(errors="ignore")
            if segment.ends:
                number, n_bytes = number + 1, 0

    def _segments(self) -> Iterator[Segment]:
        with progress_bar("learning the vocabulary", None, "B") as advance:
            yield from read_segments(self._source, LINE_STARTS, advance, splits=(None, "train"))

    def _training_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Return how many bytes of each document belong to the training split."""
        training = rows["bytes"].copy()
        free = np.flatnonzero(rows["split"] == FREE)
        free = free[np.lexsort((rows["digest"][free], rows["head"][free]))]
        if len(free):
            sizes = training[free]
            edge = _find_edges(self._source, sizes)[0]
            training[free] = np.clip(edge - (np.cumsum(sizes) - sizes), 0, sizes)
        return training
