"""What a corpus is made from: anything that yields the tokens of its splits piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

SPLITS = ("train", "validation", "test")


class DataError(ValueError):
    """Material that is missing, unreadable or unfit; the message says how to mend it."""


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens, with the bytes and words of the original that it stands for."""

    tokens: np.ndarray
    begins: bool
    """A document begins with this piece."""
    n_bytes: int
    n_words: int = 0


class Source(Protocol):
    """Material that can be divided into train, validation and test and turned into tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int:
        """The token that stands before the first of a document."""
        ...

    @property
    def has_words(self) -> bool: ...

    @property
    def n_bytes(self) -> int:
        """All splits together, for the progress bar."""
        ...

    def fingerprint(self) -> list[object]:
        """Plain values that change whenever the tokens might."""
        ...

    def setup(self, folder: Path) -> None:
        """What must be done before the first piece; files put into `folder` stay in the corpus."""
        ...

    def pieces(self, split: str) -> Iterator[Piece]:
        """The tokens of one split, in order; nothing is ever read whole."""
        ...


def stat_of(path: Path, root: Path) -> list[object]:
    """Name, size and time of a file: what says that it has not changed."""
    stat = path.stat()
    return [str(path.relative_to(root)), stat.st_size, stat.st_mtime_ns]
