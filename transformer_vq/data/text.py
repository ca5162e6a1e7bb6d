"""Bytes of files as tokens: any text, packed or not, and the sources of Python itself."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from transformer_vq.data.source import DataError, Piece, stat_of

CHUNK = 1 << 20
TRAIN_SHARE, VALIDATION_SHARE = 0.90, 0.05
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# RuntimeError: a zip file with a password, or packed in a way that Python does not know
_READ_ERRORS = (OSError, EOFError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class ByteFiles:
    """The bytes of some files, a document each, divided by their place in the whole."""

    root: Path
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    edges: tuple[int, int]
    """Where validation and test begin, counted over all files together."""
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = True

    @classmethod
    def of(cls, root: Path, files: list[Path], edges: tuple[int, int] | None = None) -> ByteFiles:
        """Sizes are found out here; without edges the split is 90 / 5 / 5 by proportion."""
        sized = [(file, unpacked_size(file)) for file in files]
        sized = [(file, size) for file, size in sized if size > 0]
        total = sum(size for _, size in sized)
        if total == 0:
            what = f"{root} is empty" if root.is_file() else f"there is no text below {root}"
            raise DataError(f"{what}: nothing to learn from; give another data.path")
        if edges is None:
            test = round(total * (TRAIN_SHARE + VALIDATION_SHARE))
            edges = (round(total * TRAIN_SHARE), test)
        return cls(root, tuple(f for f, _ in sized), tuple(n for _, n in sized), edges)

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes)

    def fingerprint(self) -> list[object]:
        root = self.root.parent if self.root.is_file() else self.root
        return [[stat_of(file, root) for file in self.files], list(self.edges)]

    def setup(self, folder: Path) -> None:
        """Bytes need no vocabulary."""

    def pieces(self, split: str) -> Iterator[Piece]:
        low, high = {
            "train": (0, self.edges[0]),
            "validation": self.edges,
            "test": (self.edges[1], self.n_bytes),
        }[split]
        start = 0
        for file, size in zip(self.files, self.sizes, strict=True):
            first, last = max(low - start, 0), min(high - start, size)
            if first < last:
                yield from _read(file, first, last)
            start += size


def text_files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder in an order that mixes them but never changes.

    Hidden files are left out.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; data.path must be a file or a folder of text")
    files = [f for f in path.rglob("*") if f.is_file()]
    return mixed(path, [f for f in files if not hidden(f.relative_to(path))])


def python_sources() -> tuple[Path, list[Path]]:
    """The folder of Python's standard library and its source files, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts)]
    return root, mixed(root, files)


def mixed(root: Path, files: list[Path]) -> list[Path]:
    """Ordered by a hash of the name, so that every split gets files of every kind."""
    return sorted(files, key=lambda f: hashlib.sha256(_name(f.relative_to(root))).digest())


def hidden(path: Path) -> bool:
    """Whether its name, or that of a folder above it, begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def count_words(data: bytes, in_word: bool = False) -> tuple[int, bool]:
    """Words between ASCII white space; `in_word`: the data before ended within one.

    Returns their number and whether this data ends within a word.
    """
    if not data:
        return 0, in_word
    n_words = len(data.split())
    if in_word and not data[:1].isspace():
        n_words -= 1  # it began in the data before
    return n_words, not data[-1:].isspace()


def unpacked_size(path: Path) -> int:
    """How many bytes a file has, once it is unpacked if its name says that it is packed."""
    if path.suffix not in (".zip", *_OPENERS):
        return path.stat().st_size
    try:
        with _open(path) as file:
            size = 0
            while data := file.read(CHUNK):
                size += len(data)
            return size
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _read(path: Path, first: int, last: int) -> Iterator[Piece]:
    """Bytes first to last of a file, as one document."""
    in_word = False
    position = first
    try:
        with _open(path) as file:
            file.seek(first)
            while position < last:
                data = file.read(min(CHUNK, last - position))
                if not data:
                    raise EOFError("it ended earlier than before")
                n_words, in_word = count_words(data, in_word)
                tokens = np.frombuffer(data, dtype=np.uint8)
                yield Piece(tokens, position == first, len(data), n_words)
                position += len(data)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if its name says that it is packed."""
    if path.suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise zipfile.BadZipFile(f"it holds {len(names)} files instead of one")
        return archive.open(names[0])
    opened: IO[bytes] = _OPENERS.get(path.suffix, open)(path, "rb")
    return opened


def _unreadable(path: Path, error: Exception) -> DataError:
    why = str(error) or type(error).__name__
    return DataError(f"cannot read {path}: {why}; it may be incomplete, copy or fetch it again")


def _name(path: Path) -> bytes:
    """The same on every system, for names that are no UTF-8 too."""
    return os.fsencode(path.as_posix())
