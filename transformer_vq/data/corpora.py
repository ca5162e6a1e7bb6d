"""Corpora on disk: tokens in memory-mapped files, made in a stream, reused while nothing changed.

A prepared corpus is a folder with `meta.json` and, per split, `<split>.bin` (the tokens) and
`<split>.starts.npy` (where documents begin). It is written under another name and renamed, so a
folder that exists is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from transformer_vq.config import DataConfig
from transformer_vq.data.books import Books
from transformer_vq.data.enwik8 import enwik8_source
from transformer_vq.data.images import ImageNet64
from transformer_vq.data.pictures import Pictures
from transformer_vq.data.source import SPLITS, DataError, Source
from transformer_vq.data.text import ByteFiles, python_sources, text_files
from transformer_vq.data.tokenizer import Tokenizer, load_tokenizer
from transformer_vq.files import write_json
from transformer_vq.progress import progress_bar

LEARNED_VOCABULARY = 32_000
FORMAT = 1  # raised whenever the same material would give other files


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

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {name: SplitSize(**size) for name, size in meta.pop("splits").items()}
        return cls(folder, **meta, sizes=sizes)

    def split(self, name: str) -> Split:
        """train, validation or test."""
        if name not in self.sizes:
            raise ValueError(f"there is no split {name!r}; choose one of {', '.join(SPLITS)}")
        tokens = np.memmap(self.folder / f"{name}.bin", dtype=_dtype(self.vocab_size), mode="r")
        starts = np.load(self.folder / f"{name}.starts.npy", mmap_mode="r")
        return Split(tokens, starts, self.bos, self.sizes[name])

    def tokenizer(self) -> Tokenizer:
        """From text to tokens and back."""
        return load_tokenizer(self.folder)


def prepare(config: DataConfig, vocab_size: int | None = None) -> Corpus:
    """The corpus that `config` names, made if it is not there yet or its material has changed.

    vocab_size: what the model expects, and how large a vocabulary that has to be learned becomes;
    None takes what the material has, and learns one of 32,000.
    Raises DataError, in one line, for material that is missing, unreadable, empty or unfit.
    """
    source = find_source(config, vocab_size or LEARNED_VOCABULARY)
    if vocab_size not in (None, source.vocab_size):
        raise DataError(
            f"{config.dataset} has a vocabulary of {source.vocab_size:,} tokens, the model one of "
            f"{vocab_size:,}; set model.vocab_size to {source.vocab_size}"
        )
    made_from = json.dumps([FORMAT, config.dataset, source.vocab_size, source.fingerprint()])
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    folder = Path(config.cache).expanduser() / f"{config.dataset}-{digest}"
    if not (folder / "meta.json").is_file():
        _make(source, config.dataset, folder)
    return Corpus.open(folder)


def find_source(config: DataConfig, vocab_size: int) -> Source:
    """The material that `config` names."""
    path = None if config.path is None else Path(config.path).expanduser()
    if config.dataset == "text":
        root, files = python_sources() if path is None else (path, text_files(path))
        return ByteFiles.of(root, files)
    if config.dataset == "enwik8":
        return enwik8_source(path, Path(config.cache).expanduser())
    if path is None:
        raise DataError(f"{config.dataset} is not downloaded here; give its folder as data.path")
    if config.dataset == "pg19":
        return Books.of(path, vocab_size, Path(config.tokenizer) if config.tokenizer else None)
    return ImageNet64.of(path) if config.dataset == "imagenet64" else Pictures.of(path)


def _make(source: Source, dataset: str, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"cannot write to {folder.parent} ({error}); set data.cache") from error
    try:
        source.setup(partial)
        _write(source, dataset, partial)
        os.replace(partial, folder)
    except OSError as error:
        if not (folder / "meta.json").is_file():  # else another process was faster
            raise DataError(f"cannot write the corpus to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(source: Source, dataset: str, folder: Path) -> None:
    splits, digest, dtype = {}, hashlib.sha256(), _dtype(source.vocab_size)
    with progress_bar(f"preparing {dataset}", source.n_bytes, "B") as advance:
        for name in SPLITS:
            starts, n_tokens, n_bytes, n_words = [], 0, 0, 0
            with open(folder / f"{name}.bin", "wb") as file:
                for piece in source.pieces(name):
                    if piece.begins:
                        starts.append(n_tokens)
                    data = piece.tokens.astype(dtype).tobytes()
                    file.write(data)
                    digest.update(data)
                    n_tokens += len(piece.tokens)
                    n_bytes += piece.n_bytes
                    n_words += piece.n_words
                    advance(piece.n_bytes)
            if n_tokens == 0:
                raise DataError(
                    f"the {name} split of {dataset} would be empty: {source.n_bytes:,} bytes are "
                    "too few to be divided into train, validation and test"
                )
            digest.update(np.array(starts, dtype=np.int64).tobytes())
            np.save(folder / f"{name}.starts.npy", np.array(starts, dtype=np.int64))
            words = n_words if source.has_words else None
            splits[name] = asdict(SplitSize(n_tokens, len(starts), n_bytes, words))
    meta = {
        "dataset": dataset,
        "vocab_size": source.vocab_size,
        "bos": source.bos,
        "sha256": digest.hexdigest(),
        "splits": splits,
    }
    write_json(folder / "meta.json", meta)


def _dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest whole numbers that hold all tokens."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
