"""Prepared corpora: prepare one from a data source, or open one; tokens are memory-mapped.

`corpus_writer.py` describes the files of a corpus, `verification.py` how they are checked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transformer_vq.config import DataConfig
from transformer_vq.data.corpus_writer import (
    FORMAT,
    META,
    source_digest,
    token_dtype,
    write_corpus,
)
from transformer_vq.data.sources.base import SPLITS, DataError, Source
from transformer_vq.data.sources.paths import error_reason, expand_user
from transformer_vq.data.sources.selection import source_from_config
from transformer_vq.data.sources.stdin import store_stdin
from transformer_vq.data.temporary import (
    locked,
    locked_atomic_folder,
    move_aside,
    work_folder,
)
from transformer_vq.data.tokenizers import TOKENIZER_FILES, Tokenizer, load_tokenizer
from transformer_vq.data.verification import verify
from transformer_vq.files import CorruptFileError, read_verified_json
from transformer_vq.progress import Reporter, reporting, warn

# Bytes without and with an end-of-document token: the defaults of the presets. They do not count as
# chosen by the user, so any tokenizer replaces them.
BYTE_VOCAB_SIZES = (256, 257)


@dataclass(frozen=True)
class SplitSize:
    """The size of a split; bytes and words are counted in the original data."""

    tokens: int
    documents: int
    bytes: int
    words: int | None
    """None if the data is not text."""


@dataclass(frozen=True)
class Split:
    """The tokens of a training, validation or test split.

    `len(split)` is the number of tokens. Arrays are memory-mapped, so a split may be larger than
    memory.
    """

    tokens: np.ndarray
    """All documents one after another, [n] of an unsigned integer type."""
    starts: np.ndarray
    """Index of the first token of each document, [m] of int64 in ascending order, starting at 0."""
    bos: int
    """The input token for the first target of a document."""
    size: SplitSize
    parts: tuple[int, ...] = ()
    """Number of tokens of each part that has its own sampling weight, in order; empty for one."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: a folder with the tokens of the splits train, validation and test.

    `prepare` creates one from data, `Corpus.open` opens an existing folder. Tokens are not read
    until a split is used.
    """

    folder: Path
    dataset: str
    """Name of the dataset, as in `DataConfig.dataset`."""
    vocab_size: int
    bos: int
    """The input token for the first target of a document."""
    sha256: str
    """Identifies the tokens and document starts of all splits, wherever they are stored."""
    sizes: dict[str, SplitSize]
    """The size of each split by name."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the vocabulary file; None if tokens are bytes."""
    end_of_document: bool = False
    """Whether a token follows each document."""
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The number of tokens of each part of a split."""

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a prepared corpus and verify its files.

        Raises DataError if a file is missing, corrupt or was changed.
        """
        try:
            return _read(folder)
        except CorruptFileError as error:
            raise _unusable(folder, error) from error

    def split(self, name: str) -> Split:
        """Return the split "train", "validation" or "test".

        Raises DataError for other names, and if files were changed after the corpus was opened.
        """
        if name not in self.sizes:
            if name in SPLITS:
                raise DataError(
                    f"these data have no {name} split; set --data.{name}-share or "
                    f"--data.{name}-path"
                )
            raise DataError(f"unknown split {name!r}; choose one of {', '.join(self.sizes)}")
        try:
            return _read_split(self, name)
        except CorruptFileError as error:
            raise _unusable(self.folder, error) from error

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the corpus, which converts text to tokens and back."""
        return load_tokenizer(self.folder, self.tokenizer_sha256, self.end_of_document)


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
        source = source_from_config(config, wanted)
        if vocab_size not in (None, *BYTE_VOCAB_SIZES, source.vocab_size):
            raise DataError(
                f"{config.dataset} has a vocabulary of {source.vocab_size:,} tokens, but the model "
                f"expects {vocab_size:,}; set --model.vocab-size to {source.vocab_size}"
            )
        fingerprint = source.fingerprint()
        digest = source_digest(source, config.dataset, fingerprint)
        folder = cache / f"{config.dataset}-{digest}"
        corpus = _open_existing(folder, digest)
        if corpus is None:
            _create(source, fingerprint, config, folder)
            corpus = Corpus.open(folder)
        return corpus


def _open_existing(folder: Path, digest: str) -> Corpus | None:
    """Return the corpus in a folder, or None; a corrupt or different one is moved aside.

    digest: the expected result of `source_digest`.
    """
    if not os.path.lexists(folder):
        return None
    try:
        return _read(folder, digest)
    except CorruptFileError:
        pass
    try:
        with locked(folder.parent):
            try:
                return _read(folder, digest)  # another process may have replaced it meanwhile
            except CorruptFileError as error:
                if os.path.lexists(folder):
                    warn(f"{folder} is corrupt ({error}); preparing it again")
                    move_aside(folder)
    except OSError as error:
        raise DataError(
            f"{folder} is corrupt and cannot be replaced: {error_reason(error)}; delete it or use "
            "another --data.cache"
        ) from error
    return None


def _create(source: Source, fingerprint: list[object], config: DataConfig, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(folder) as work, locked_atomic_folder(folder) as partial:
            if os.path.lexists(folder):
                return  # another process has created it in the meantime
            source.setup(partial, work)
            write_corpus(source, config.dataset, partial, config.ends_documents)
            if source.fingerprint() != fingerprint:
                raise DataError(
                    f"the files of {config.dataset} changed while they were read; run the command "
                    "again"
                )
    except OSError as error:
        if not os.path.lexists(folder):  # otherwise another process has created it
            raise DataError(
                f"cannot write to {folder.parent}: {error_reason(error)}; free disk space or use "
                "another --data.cache"
            ) from error


def _read(folder: Path, digest: str | None = None) -> Corpus:
    """Open a corpus; raise CorruptFileError if any file differs from what was written.

    digest: the expected result of `source_digest`; None accepts a corpus of any data.
    """
    meta = read_verified_json(folder / META)
    if meta.get("format") != FORMAT:
        raise CorruptFileError(f"{folder / META} was written by another version")
    try:
        if digest not in (None, meta["made_from"]):
            raise CorruptFileError(f"{folder / META} belongs to other data")
        corpus = _from_meta(folder, meta)
        verify(folder, meta["files"])
    except CorruptFileError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{folder / META} does not describe a corpus") from error
    return corpus


def _from_meta(folder: Path, meta: dict[str, Any]) -> Corpus:
    sizes = {name: SplitSize(**meta["splits"][name]) for name in SPLITS if name in meta["splits"]}
    parts = {name: tuple(map(int, meta["tokens_by_part"][name])) for name in sizes}
    vocab_size, bos, files = meta["vocab_size"], meta["bos"], meta["files"]
    for name, size in sizes.items():
        n_bytes = size.tokens * np.dtype(token_dtype(vocab_size)).itemsize
        is_consistent = files[f"{name}.bin"]["size"] == n_bytes and f"{name}.starts.npy" in files
        is_consistent &= sum(parts[name]) == size.tokens and min(parts[name]) >= 0
        if not (is_consistent and 0 < size.documents <= size.tokens and 0 <= bos < vocab_size):
            raise ValueError(f"the sizes of {name} are inconsistent")
    if not sizes or not isinstance(meta["end_of_document"], bool):
        raise ValueError("splits are missing")
    tokenizer = next((files[name]["sha256"] for name in TOKENIZER_FILES if name in files), None)
    return Corpus(
        folder,
        meta["dataset"],
        vocab_size,
        bos,
        meta["tokens_sha256"],
        sizes,
        tokenizer,
        meta["end_of_document"],
        parts,
    )


def _read_split(corpus: Corpus, name: str) -> Split:
    """Map the files of a split and make all cheap checks, because later code trusts the arrays."""
    size, path = corpus.sizes[name], corpus.folder / f"{name}.starts.npy"
    try:
        tokens = np.memmap(path.with_name(f"{name}.bin"), token_dtype(corpus.vocab_size), mode="r")
        starts = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy raises many kinds of errors for corrupt headers
        raise CorruptFileError(f"cannot read its {name} split: {error_reason(error)}") from error
    if len(tokens) != size.tokens:
        raise CorruptFileError(f"{name}.bin has {len(tokens):,} tokens instead of {size.tokens:,}")
    if not isinstance(starts, np.ndarray) or starts.dtype != np.int64 or starts.ndim != 1:
        raise CorruptFileError(f"{path.name} is not a one-dimensional array of int64")
    if len(starts) != size.documents or starts[0] != 0 or starts[-1] >= size.tokens:
        raise CorruptFileError(f"{path.name} does not match {name}.bin")
    if not (starts[1:] > starts[:-1]).all():
        raise CorruptFileError(f"{path.name} is not in ascending order")
    return Split(tokens, starts, corpus.bos, size, corpus.parts[name])


def _unusable(folder: Path, error: CorruptFileError) -> DataError:
    return DataError(f"{folder} is not a usable corpus ({error}); delete it and prepare it again")
