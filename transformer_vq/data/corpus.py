"""Corpora on disk: tokens in memory-mapped files, made in a stream, reused while nothing changed.

A prepared corpus is a folder with `meta.json` and, per split, `<split>.bin` (the tokens) and
`<split>.starts.npy` (where documents begin). It is written under another name and renamed.
`meta.json` holds the size and SHA-256 of every other file; see `verification.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_vq.config import DataConfig
from transformer_vq.data.sources.base import SPLITS, DataError, Source, reason
from transformer_vq.data.sources.books import Books
from transformer_vq.data.sources.enwik8 import enwik8_source
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.images import ImageFolder
from transformer_vq.data.sources.text import ByteFiles, python_sources, text_files
from transformer_vq.data.temporary import locked, locked_atomic_folder, move_aside
from transformer_vq.data.tokenizers import MODEL_FILE, Tokenizer, load_tokenizer
from transformer_vq.data.verification import RecordedFile, record_of, remember, verify
from transformer_vq.files import CorruptFileError, read_verified_json, write_verified_json
from transformer_vq.progress import progress_bar, warn

LEARNED_VOCABULARY = 32_000
META = "meta.json"
FORMAT = 3  # raised whenever the same data would give other files


@dataclass(frozen=True)
class SplitSize:
    """How much there is in a split; words and bytes are those of the original material."""

    tokens: int
    documents: int
    bytes: int
    words: int | None


@dataclass(frozen=True)
class Split:
    """tokens: [n], starts: [m] where documents begin, the first being 0."""

    tokens: np.ndarray
    starts: np.ndarray
    bos: int
    size: SplitSize

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus; nothing of its tokens is read until it is used."""

    folder: Path
    dataset: str
    vocab_size: int
    bos: int
    sha256: str
    """Of all tokens and starts: says whether two corpora are the same."""
    sizes: dict[str, SplitSize]
    tokenizer_sha256: str | None = None
    """Of `tokenizer.model`; None if tokens are bytes."""

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a prepared corpus and verify its files.

        Raises DataError, in one line, if anything in the folder is not as it was written.
        """
        try:
            return _read(folder)
        except CorruptFileError as error:
            raise _unusable(folder, error) from error

    def split(self, name: str) -> Split:
        """train, validation or test."""
        if name not in self.sizes:
            raise DataError(f"there is no split {name!r}; choose one of {', '.join(SPLITS)}")
        try:
            return _read_split(self, name)
        except CorruptFileError as error:
            raise _unusable(self.folder, error) from error

    def tokenizer(self) -> Tokenizer:
        """From text to tokens and back."""
        return load_tokenizer(self.folder, self.tokenizer_sha256)


def prepare(config: DataConfig, vocab_size: int | None = None) -> Corpus:
    """The corpus that `config` names, made if it is not there yet or its material has changed.

    vocab_size: what the model expects, and how large a vocabulary that has to be learned becomes;
    None takes what the material has, and learns one of 32,000.
    A corrupt corpus is made again, with a warning.
    Raises DataError, in one line, for data that are missing, unreadable, empty or unsuitable.
    """
    source = find_source(config, vocab_size or LEARNED_VOCABULARY)
    if vocab_size not in (None, source.vocab_size):
        raise DataError(
            f"{config.dataset} has a vocabulary of {source.vocab_size:,} tokens, the model one of "
            f"{vocab_size:,}; set --model.vocab-size to {source.vocab_size}"
        )
    fingerprint = source.fingerprint()
    made_from = _data_digest(source, config.dataset, fingerprint)
    folder = _expanded(config.cache, "--data.cache") / f"{config.dataset}-{made_from}"
    corpus = _find(folder, made_from)
    if corpus is None:
        _make(source, fingerprint, config.dataset, folder)
        corpus = Corpus.open(folder)
    return corpus


def _data_digest(source: Source, dataset: str, fingerprint: list[object]) -> str:
    """Identify the data of a corpus, and the format of its files."""
    made_from = json.dumps([FORMAT, dataset, source.vocab_size, fingerprint])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def find_source(config: DataConfig, vocab_size: int) -> Source:
    """The material that `config` names."""
    path = None if config.path is None else _expanded(config.path, "--data.path")
    if config.dataset == "text":
        root, files = python_sources() if path is None else (path, text_files(path))
        return ByteFiles.of(root, files)
    if config.dataset == "enwik8":
        return enwik8_source(path, _expanded(config.cache, "--data.cache"))
    if path is None:
        raise DataError(f"{config.dataset} is not downloaded here; give its folder as --data.path")
    if config.dataset == "pg19":
        tokenizer = config.tokenizer
        given = None if tokenizer is None else _expanded(tokenizer, "--data.tokenizer")
        return Books.of(path, vocab_size, given)
    return ImageNet64.of(path) if config.dataset == "imagenet64" else ImageFolder.of(path)


def _expanded(path: str, option: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{option} {path}: there is no such home folder; give a full path"
        ) from error


def _find(folder: Path, made_from: str) -> Corpus | None:
    """Return the corpus in a folder, if any; a corrupt or different one is moved out of the way."""
    if not os.path.lexists(folder):
        return None
    try:
        return _read(folder, made_from)
    except CorruptFileError:
        pass
    try:
        with locked(folder.parent):
            try:
                return _read(folder, made_from)  # another process may just have replaced it
            except CorruptFileError as error:
                if os.path.lexists(folder):
                    warn(f"{folder} is corrupt ({error}); preparing it again")
                    move_aside(folder)
    except OSError as error:
        why = f"is corrupt and cannot be replaced: {reason(error)}"
        raise DataError(f"{folder} {why}; delete it or use another --data.cache") from error
    return None


def _make(source: Source, fingerprint: list[object], dataset: str, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked_atomic_folder(folder) as partial:
            source.setup(partial)
            _write(source, dataset, partial)
            if source.fingerprint() != fingerprint:
                raise DataError(
                    f"the files of {dataset} changed while they were read; run it again"
                )
    except OSError as error:
        if not os.path.lexists(folder):  # else another process was faster
            why = f"cannot write to {folder.parent}: {reason(error)}"
            raise DataError(f"{why}; free disk space or use another --data.cache") from error


def _write(source: Source, dataset: str, folder: Path) -> None:
    splits, files = {}, {}
    digest, dtype = hashlib.sha256(), _dtype(source.vocab_size)
    with progress_bar(f"preparing {dataset}", source.n_bytes, "B") as advance:
        for name in SPLITS:
            starts, n_tokens, n_bytes, n_words = [], 0, 0, 0
            with RecordedFile(folder / f"{name}.bin") as file:
                for piece in source.chunks(name):
                    if piece.begins:
                        starts.append(n_tokens)
                    data = piece.tokens.astype(dtype).tobytes()
                    file.write(data)
                    digest.update(data)
                    n_tokens += len(piece.tokens)
                    n_bytes += piece.n_bytes
                    n_words += piece.n_words
                    advance(piece.n_bytes)
            files[f"{name}.bin"] = file.record
            if n_tokens == 0:
                raise DataError(
                    f"the {name} split of {dataset} would be empty: {source.n_bytes:,} bytes are "
                    "too few to be divided into train, validation and test"
                )
            digest.update(np.array(starts, dtype=np.int64).tobytes())
            with RecordedFile(folder / f"{name}.starts.npy") as file:
                np.save(file, np.array(starts, dtype=np.int64))
            files[f"{name}.starts.npy"] = file.record
            words = n_words if source.has_words else None
            splits[name] = asdict(SplitSize(n_tokens, len(starts), n_bytes, words))
    for path in sorted(folder.iterdir()):  # what `setup` has written
        if path.name not in files:
            files[path.name] = record_of(path)
    meta = {
        "format": FORMAT,
        "dataset": dataset,
        "made_from": _data_digest(source, dataset, source.fingerprint()),
        "vocab_size": source.vocab_size,
        "bos": source.bos,
        "tokens_sha256": digest.hexdigest(),
        "splits": splits,
        "files": files,
    }
    write_verified_json(folder / META, meta)
    remember(folder, files)


def _read(folder: Path, made_from: str | None = None) -> Corpus:
    """Raises CorruptFileError if anything is not as `_write` left it.

    made_from: the digest of the data, if known; a corpus of other data is rejected.
    """
    meta = read_verified_json(folder / META)
    if meta.get("format") != FORMAT:
        raise CorruptFileError(f"{folder / META} was written by another version")
    try:
        if made_from not in (None, meta["made_from"]):
            raise CorruptFileError(f"{folder / META} belongs to other data")
        corpus = _corpus_of(folder, meta)
        verify(folder, meta["files"])
    except CorruptFileError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{folder / META} does not describe a corpus") from error
    return corpus


def _corpus_of(folder: Path, meta: dict[str, Any]) -> Corpus:
    sizes = {name: SplitSize(**meta["splits"][name]) for name in SPLITS}
    vocab_size, bos, files = meta["vocab_size"], meta["bos"], meta["files"]
    for name, size in sizes.items():
        n_bytes = size.tokens * np.dtype(_dtype(vocab_size)).itemsize
        is_consistent = files[f"{name}.bin"]["size"] == n_bytes and f"{name}.starts.npy" in files
        if not (is_consistent and 0 < size.documents <= size.tokens and 0 <= bos < vocab_size):
            raise ValueError(f"the sizes of {name} contradict each other")
    tokenizer = files[MODEL_FILE]["sha256"] if MODEL_FILE in files else None
    return Corpus(folder, meta["dataset"], vocab_size, bos, meta["tokens_sha256"], sizes, tokenizer)


def _read_split(corpus: Corpus, name: str) -> Split:
    """Checks whatever is cheap to check, since tokens are used without another look."""
    size, path = corpus.sizes[name], corpus.folder / f"{name}.starts.npy"
    try:
        tokens = np.memmap(path.with_name(f"{name}.bin"), _dtype(corpus.vocab_size), mode="r")
        starts = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy raises errors of many kinds for corrupt headers
        raise CorruptFileError(f"cannot read its {name} split: {reason(error)}") from error
    if len(tokens) != size.tokens:
        raise CorruptFileError(f"{name}.bin has {len(tokens):,} tokens instead of {size.tokens:,}")
    if not isinstance(starts, np.ndarray) or starts.dtype != np.int64 or starts.ndim != 1:
        raise CorruptFileError(f"{path.name} is not a one-dimensional array of int64")
    if len(starts) != size.documents or starts[0] != 0 or starts[-1] >= size.tokens:
        raise CorruptFileError(f"{path.name} does not fit {name}.bin")
    if not (starts[1:] > starts[:-1]).all():
        raise CorruptFileError(f"{path.name} is not in ascending order")
    return Split(tokens, starts, corpus.bos, size)


def _unusable(folder: Path, error: CorruptFileError) -> DataError:
    return DataError(f"{folder} is not a usable corpus ({error}); delete it and prepare it again")


def _dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest whole numbers that hold all tokens."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
