"""Text files as byte tokens: any file or folder of text, and the sources of Python itself."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import Chunk, DataError, file_ranges
from transformer_vq.data.sources.compression import CHUNK, decompressed_size, open_decompressed
from transformer_vq.data.sources.paths import (
    READ_ERRORS,
    error_reason,
    file_fingerprint,
    hash_order,
    list_files,
    path_kind,
)

TRAIN_SHARE, VALIDATION_SHARE = 0.90, 0.05
_COMPRESSED = (".zip", ".zst", ".gz", ".xz", ".bz2")
_STRUCTURED = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
_MAX_LINE = 1 << 24


@dataclass(frozen=True)
class ByteFiles:
    """The bytes of files, one document per file; splits are ranges of all bytes together."""

    root: Path
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    edges: tuple[int, int]
    """Where validation and test start, counted in bytes over all files."""
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = True

    @classmethod
    def from_files(
        cls, root: Path, files: list[Path], edges: tuple[int, int] | None = None
    ) -> ByteFiles:
        """Measure the files and skip empty ones. Without `edges`, the splits are 90, 5 and 5 %."""
        sized = [(file, _size(file)) for file in files]
        sized = [(file, size) for file, size in sized if size > 0]
        total = sum(size for _, size in sized)
        if total == 0:
            problem = f"{root} is empty" if root.is_file() else f"{root} contains no text"
            raise DataError(f"{problem}; give another --data.path")
        if edges is None:
            test = round(total * (TRAIN_SHARE + VALIDATION_SHARE))
            edges = (round(total * TRAIN_SHARE), test)
        return cls(root, tuple(f for f, _ in sized), tuple(n for _, n in sized), edges)

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes)

    def fingerprint(self) -> list[object]:
        root = self.root.parent if self.root.is_file() else self.root
        return [[file_fingerprint(file, root) for file in self.files], list(self.edges)]

    def setup(self, folder: Path) -> None:
        """Do nothing: bytes need no vocabulary."""

    def chunks(self, split: str) -> Iterator[Chunk]:
        for index, first, last in file_ranges(split, self.edges, self.sizes):
            yield from _read(self.files[index], first, last, is_end=last == self.sizes[index])


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or all files below a folder in a fixed pseudorandom order.

    Hidden files are skipped. Raises DataError for files that are not plain text, such as JSONL.
    """
    is_file = path_kind(path, "--data.path must be a text file or a folder of them") == "file"
    files = [path] if is_file else hash_order(path, list_files(path))
    _reject_structured(files, is_file)
    return files


def python_sources() -> tuple[Path, list[Path]]:
    """Return the folder of Python's standard library and its source files, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [f for f in root.rglob("*.py") if not excluded & set(f.relative_to(root).parts)]
    return root, hash_order(root, files)


def count_words(data: bytes, in_word: bool = False) -> tuple[int, bool]:
    """Count words separated by ASCII white space.

    in_word: whether the preceding data ended inside a word, which is not counted again.
    Returns the number of words and whether this data ends inside a word.
    """
    if not data:
        return 0, in_word
    n_words = len(data.split())
    if in_word and not data[:1].isspace():
        n_words -= 1  # it started in the preceding data
    return n_words, not data[-1:].isspace()


def _reject_structured(files: list[Path], is_single: bool) -> None:
    """Reject files that store text in fields, because their raw bytes are rarely wanted.

    JSON files in a folder are accepted: they are part of many source trees.
    """
    suffixes = (*_STRUCTURED, ".json") if is_single else _STRUCTURED
    for file in sorted(files):
        stem, suffix = os.path.splitext(file.name.lower())
        if suffix in _COMPRESSED:  # as in x.jsonl.gz
            suffix = os.path.splitext(stem)[1]
        if suffix in suffixes:
            kind = f"a {suffix[1:].upper()} file"
        elif is_single and _has_json_lines(file):
            kind = "a JSONL file by its content"
        else:
            continue
        raise DataError(
            f"{file} is {kind}, which is not supported; extract the text into .txt files and give "
            "their folder as --data.path"
        )


def _has_json_lines(path: Path) -> bool:
    """Return whether the first two non-empty lines are JSON objects."""
    try:
        with open_decompressed(path) as file:
            lines = (line for line in iter(lambda: file.readline(_MAX_LINE), b"") if line.strip())
            head = list(islice(lines, 2))
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    try:
        return len(head) == 2 and all(isinstance(json.loads(line), dict) for line in head)
    except (ValueError, RecursionError):
        return False


def _size(path: Path) -> int:
    try:
        return decompressed_size(path)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _read(path: Path, first: int, last: int, is_end: bool) -> Iterator[Chunk]:
    """Yield the bytes first to last of a file as one document.

    is_end: whether the file must end at `last`.
    """
    in_word = False
    position = first
    try:
        with open_decompressed(path) as file:
            file.seek(first)
            while position < last:
                data = file.read(min(CHUNK, last - position))
                if not data:
                    raise EOFError("it has become shorter")
                n_words, in_word = count_words(data, in_word)
                tokens = np.frombuffer(data, dtype=np.uint8)
                yield Chunk(tokens, position == first, len(data), n_words)
                position += len(data)
            if is_end and file.read(1):
                raise EOFError("it has become longer")
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"cannot read {path}: {error_reason(error)}; it may be incomplete, copy or download it "
        "again"
    )
