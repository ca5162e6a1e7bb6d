"""Prepare a corpus: tokens are written once, and the order of a split is a sort of its index.

A corpus is prepared in a work folder, which is renamed when it is complete. After an interruption,
the next preparation continues in the same work folder. The cache is locked by an open file
descriptor, so the lock is released however its process ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from transformer_vq.config import DataConfig
from transformer_vq.data import corpora
from transformer_vq.data.bpe import LINE_STARTS, learn_bpe
from transformer_vq.data.corpora import Source, find_source
from transformer_vq.data.corpus import FORMAT, META, TOKENS, Corpus, SplitSize, token_dtype
from transformer_vq.data.documents import (
    DOCUMENTS,
    END,
    ROW,
    divide_documents,
    read_chunks,
    tokenize,
    training_bytes,
)
from transformer_vq.data.paths import SPLITS, DataError, error_reason
from transformer_vq.data.text import store_stdin
from transformer_vq.data.tokenizers import Tokenizer, load_tokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import CorruptFileError, atomic_folder, write_json, write_manifest
from transformer_vq.progress import Advance, Reporter, info, progress_bar, reporting, warn

# Bytes without and with an end-of-document token: the defaults of the presets. They do not count as
# chosen by the user, so any tokenizer replaces them.
BYTE_VOCAB_SIZES = (256, 257)
MAX_LEARN_BYTES = 250_000_000  # bounds the memory, also for languages without spaces


def prepare(
    config: DataConfig, vocab_size: int | None = None, *, reporter: Reporter | None = None
) -> Corpus:
    """Return the corpus that a config names; create it in its cache folder if necessary.

    The corpus is reused by later calls until the data changes. A corrupt corpus is created again,
    with a warning. Processes that prepare data in the same cache wait for each other.
    vocab_size: that of the model, which the data must match, and of a vocabulary that is learned;
    None accepts any size. reporter: receives progress and warnings; None keeps the current one.

    Raises DataError, with a message of one line, if the data is missing, unreadable, empty or does
    not match `vocab_size`, or if the cache cannot be written.
    """
    with reporting(reporter):
        cache = Path(os.path.expanduser(config.cache_folder))
        config = store_stdin(config, cache)
        wanted = None if vocab_size in BYTE_VOCAB_SIZES else vocab_size
        source = find_source(config, wanted)
        if vocab_size not in (None, *BYTE_VOCAB_SIZES, source.vocab_size):
            size = source.vocab_size
            problem = f"{size:,} tokens, but the model expects {vocab_size:,}"
            fix = f"set --model.vocab-size to {size}"
            raise DataError(f"{config.dataset} has a vocabulary of {problem}; {fix}")
        digest = _digest(source)
        folder = cache / f"{config.dataset}-{digest}"
        with suppress(FileNotFoundError, CorruptFileError):
            return Corpus.open(folder)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache):
                if os.path.lexists(folder):
                    try:
                        return Corpus.open(folder)  # created by another process meanwhile
                    except CorruptFileError as error:
                        warn(f"{folder} is corrupt ({error}); preparing it again")
                        shutil.rmtree(folder)
                work = folder.with_name(f".{folder.name}.work")
                work.mkdir(exist_ok=True)
                try:
                    _create(source, work)
                    if _digest(source) != digest:
                        raise DataError("files changed while they were read; run the command again")
                except UserError:  # the data cannot be used, so there is nothing to resume
                    shutil.rmtree(work, ignore_errors=True)
                    raise
                os.replace(work, folder)
        except OSError as error:
            fix = "free disk space or use another --data.cache"
            raise DataError(f"cannot write to {cache}: {error_reason(error)}; {fix}") from error
        return Corpus.open(folder)


def _digest(source: Source) -> str:
    values = json.dumps([FORMAT, source.fingerprint()])
    return hashlib.sha256(values.encode()).hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the block or the process ends; wait while another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                info(f"another process is preparing data in {folder}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _create(source: Source, work: Path) -> None:
    """Write all files of a corpus to the work folder; resume what is already in it."""
    tokenizer = source.tokenizer or _learn(source, work / "tokenizer")
    rows = tokenize(source, tokenizer, work)
    if not len(rows):
        raise DataError(_no_text(source))
    if source.dataset == "enwik8" and (n_bytes := int(rows["bytes"].sum())) != corpora.SIZE:
        problem = f"{source.inputs[0].path} has {n_bytes:,} bytes instead of {corpora.SIZE:,}"
        warn(f"{problem}: results cannot be compared with published ones of enwik8")
    tokens = np.memmap(work / TOKENS, token_dtype(source.vocab_size), mode="r")
    rows = divide_documents(source, tokenizer, rows, tokens)
    sizes = {}
    identity = hashlib.sha256(repr((tokenizer.sha256, tokenizer.bos, tokenizer.eod)).encode())
    for name in source.splits:
        found = rows[rows["split"] == SPLITS.index(name)]
        if not len(found):
            problem = f"the {name} split of {source.dataset} would be empty"
            size = f"{rows['bytes'].sum():,} bytes are too few for {', '.join(source.splits)}"
            raise DataError(f"{problem}: {size}; use more data")
        starts = np.cumsum(found["tokens"]) - found["tokens"]
        np.save(work / f"{name}.npy", np.stack([starts, found["offset"]]))
        identity.update(np.stack([found["digest"].view("<i8"), starts, found["bytes"]]).tobytes())
        n_tokens, n_bytes, n_words = (int(found[x].sum()) for x in ("tokens", "bytes", "words"))
        words = None if source.has_images else n_words
        sizes[name] = vars(SplitSize(n_tokens, len(found), n_bytes, words))
    tokenizer.save(work)
    shutil.rmtree(work / "tokenizer", ignore_errors=True)
    (work / DOCUMENTS).unlink()
    meta = {
        "format": FORMAT,
        "dataset": source.dataset,
        "vocab_size": source.vocab_size,
        "bos": tokenizer.bos,
        "sha256": identity.hexdigest(),
        "tokenizer_sha256": tokenizer.sha256,
        "end_of_document": source.ends_documents,
        "splits": sizes,
    }
    write_json(work / META, meta)
    write_manifest(work)


def _no_text(source: Source) -> str:
    n, path = len(source.inputs), source.inputs[0].path
    return f"{path} is empty{f', as are all {n:,} files' * (n > 1)}; give another path"


def _learn(source: Source, folder: Path) -> Tokenizer:
    """Learn a vocabulary from the training documents, unless that is already done."""
    if not folder.is_dir():
        with progress_bar("reading the text", None, "B") as advance:
            limits = _training_limits(source, advance)
        with (
            atomic_folder(folder) as partial,
            progress_bar("learning the vocabulary", None, "B") as advance,
        ):
            learn_bpe(_training_texts(source, limits, advance), source.vocab_size, partial)
    return load_tokenizer(folder, end_of_document=source.ends_documents)


def _training_limits(source: Source, advance: Advance) -> np.ndarray:
    """Return how many bytes of each document a vocabulary is learned from.

    Which documents are training ones is known only when all have been read.
    """
    found = bytearray()
    for chunk in read_chunks(source, advance, as_bytes=True, splits=(None, "train")):
        if chunk.row is not None and chunk.row["bytes"] != END:
            found += chunk.row.tobytes()
    rows = np.frombuffer(found, ROW)
    if not rows["bytes"].any():
        raise DataError(_no_text(source))
    limits = training_bytes(source, rows)
    order = np.argsort(rows["digest"], kind="stable")
    before = np.cumsum(limits[order]) - limits[order]
    limits[order] = np.clip(MAX_LEARN_BYTES - before, 0, limits[order])
    return limits


def _training_texts(source: Source, limits: np.ndarray, advance: Advance) -> Iterator[str]:
    """Yield the start of each document, in chunks. limits: its length in bytes."""
    number = n_bytes = 0
    for chunk in read_chunks(source, advance, LINE_STARTS, splits=(None, "train")):
        if chunk.row is not None and chunk.row["bytes"] == END:
            continue
        data = str(chunk.text).encode()[: max(int(limits[number]) - n_bytes, 0)]
        n_bytes += len(data)
        yield data.decode(errors="ignore")
        if chunk.row is not None:
            number, n_bytes = number + 1, 0
