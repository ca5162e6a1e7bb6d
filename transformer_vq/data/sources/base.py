"""The interface of a data source: it yields the tokens of its splits chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from transformer_vq.errors import UserError

SPLITS = ("train", "validation", "test")


class DataError(UserError):
    """Data that is missing, unreadable or unsuitable; the message names the fix."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one document, with the number of original bytes and words."""

    tokens: np.ndarray
    starts_document: bool
    """Whether a document starts with this chunk."""
    n_bytes: int
    n_words: int = 0
    part: int = 0
    """The part of the corpus it belongs to; parts are in ascending order."""


class Source(Protocol):
    """Data that can be split into train, validation and test and converted to tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int:
        """The input token for the first target of a document."""
        ...

    @property
    def has_words(self) -> bool:
        """Whether chunks count words."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that it has, in the order of SPLITS."""
        ...

    @property
    def n_bytes(self) -> int:
        """The size of all splits together, for the progress bar; known after `setup`."""
        ...

    def fingerprint(self) -> list[object]:
        """Return JSON values that change whenever the tokens may change."""
        ...

    def setup(self, folder: Path, work: Path) -> None:
        """Prepare for `chunks`; files written to `folder` become part of the corpus.

        work: a folder for intermediate results. It is kept if the preparation is interrupted, so
        that the next one can resume.
        """
        ...

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the tokens of one split in order, without loading the split into memory."""
        ...


def split_range(split: str, edges: tuple[int, int], total: int) -> tuple[int, int]:
    """Return where a split starts and ends. edges: where validation and test start."""
    return {"train": (0, edges[0]), "validation": edges, "test": (edges[1], total)}[split]


def file_ranges(
    split: str, edges: tuple[int, int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (index, first, last) for each file that overlaps a split.

    sizes: of all files, in order. edges: where validation and test start, counted over all files.
    The split contains the items from `first` up to, but not including, `last` of that file.
    """
    low, high = split_range(split, edges, sum(sizes))
    start = 0
    for index, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            yield index, first, last
        start += size
