"""Bytes of files as tokens: any text, packed or not, and the sources of Python itself."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from transformer_vq.data.sources.base import (
    READ_ERRORS,
    Chunk,
    DataError,
    files_in,
    kind_of,
    reason,
    stat_of,
)

CHUNK = 1 << 20
TRAIN_SHARE, VALIDATION_SHARE = 0.90, 0.05
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_PACKED = (".zip", ".zst", *_OPENERS)
_STRUCTURED = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
_MAX_LINE = 1 << 24


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
            raise DataError(f"{what}: nothing to learn from; give another --data.path")
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

    def chunks(self, split: str) -> Iterator[Chunk]:
        low, high = {
            "train": (0, self.edges[0]),
            "validation": self.edges,
            "test": (self.edges[1], self.n_bytes),
        }[split]
        start = 0
        for file, size in zip(self.files, self.sizes, strict=True):
            first, last = max(low - start, 0), min(high - start, size)
            if first < last:
                yield from _read(file, first, last, is_end=last == size)
            start += size


def text_files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder in an order that mixes them but never changes.

    Hidden files are left out. Raises DataError for files that are not plain text, such as JSONL.
    """
    is_file = kind_of(path, "--data.path must be a file or a folder of text") == "file"
    files = [path] if is_file else mixed(path, files_in(path))
    _reject_structured(files, is_file)
    return files


def python_sources() -> tuple[Path, list[Path]]:
    """The folder of Python's standard library and its source files, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts)]
    return root, mixed(root, files)


def mixed(root: Path, files: list[Path]) -> list[Path]:
    """Ordered by a hash of the name, so that every split gets files of every kind."""
    return sorted(files, key=lambda f: hashlib.sha256(_name(f.relative_to(root))).digest())


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
    try:
        if path.suffix.lower() not in (".zip", *_OPENERS):
            return path.stat().st_size
        with _open(path) as file:
            size = 0
            while data := file.read(CHUNK):
                size += len(data)
            return size
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _reject_structured(files: list[Path], is_single: bool) -> None:
    """Reject files that keep text in fields: their raw bytes are not what a user wants to learn.

    JSON files in a folder are allowed, since they are part of many source trees.
    """
    endings = (*_STRUCTURED, ".json") if is_single else _STRUCTURED
    for file in sorted(files):
        stem, ending = os.path.splitext(file.name.lower())
        if ending in _PACKED:
            ending = os.path.splitext(stem)[1]
        if ending in endings:
            what = f"a {ending[1:].upper()} file"
        elif is_single and _has_json_lines(file):
            what = "a JSONL file by its content"
        else:
            continue
        fix = "extract the text into .txt files and pass their folder as --data.path"
        raise DataError(f"{file} is {what}, a format that is not supported; {fix}")


def _has_json_lines(path: Path) -> bool:
    """Whether the first two lines that are not empty are JSON objects."""
    try:
        with _open(path) as file:
            lines = (line for line in iter(lambda: file.readline(_MAX_LINE), b"") if line.strip())
            head = list(islice(lines, 2))
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    try:
        return len(head) == 2 and all(isinstance(json.loads(line), dict) for line in head)
    except (ValueError, RecursionError):
        return False


def _read(path: Path, first: int, last: int, is_end: bool) -> Iterator[Chunk]:
    """Bytes first to last of a file, as one document; `is_end`: nothing may follow them."""
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
                yield Chunk(tokens, position == first, len(data), n_words)
                position += len(data)
            if is_end and file.read(1):
                raise EOFError("it has grown while it was read")
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if its name says that it is packed."""
    if path.suffix.lower() == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            archive.close()
            raise zipfile.BadZipFile(f"it holds {len(names)} files instead of one")
        return archive.open(names[0])
    opened: IO[bytes] = _OPENERS.get(path.suffix.lower(), open)(path, "rb")
    return opened


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"cannot read {path}: {reason(error)}; it may be incomplete, copy or fetch it again"
    )


def _name(path: Path) -> bytes:
    """The same on every system, for names that are no UTF-8 too."""
    return os.fsencode(path.as_posix())
