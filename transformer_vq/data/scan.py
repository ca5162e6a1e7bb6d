"""The first pass over text: the size and digest of every document, then its order and its split.

Documents are ordered by a digest of their content, not by file name or position. The same documents
therefore give the same tokens, whatever format, file or order they are stored in. Equal documents
are next to each other, so they rarely end up in different splits.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.sources.readers import Piece
from transformer_vq.files import atomic_write

FREE = -1  # the split of documents that are divided by share
EDGE_TOLERANCE = 0.25  # of the smaller of validation and test


@dataclass(frozen=True)
class Scan:
    """All documents in the order in which they are read."""

    sizes: np.ndarray
    """Bytes of each document, [n] of int64."""
    keys: np.ndarray
    """Digest of the content of each document, [n] of uint64."""
    splits: np.ndarray
    """Index in SPLITS of each document, or FREE, [n]."""
    parts: np.ndarray
    """Part of the corpus that each document belongs to, [n]."""

    def save(self, path: Path) -> None:
        with atomic_write(path) as partial, open(partial, "wb") as file:
            np.savez(file, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Scan:
        with np.load(path) as arrays:
            return cls(**arrays)

    @classmethod
    def concatenate(cls, scans: Sequence[Scan]) -> Scan:
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(scan, name) for scan in scans]) for name in names))


def scan_documents(
    pieces: Iterable[Piece], split: str | None, part: int, advance: Callable[[int], None]
) -> Scan:
    """Measure all documents of one split and part; `advance` receives the number of bytes read."""
    sizes, keys = array("q"), array("Q")
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        if piece.starts_document:
            if sizes:
                keys.append(int.from_bytes(digest.digest()))
            digest = hashlib.blake2b(digest_size=8)
            sizes.append(0)
        digest.update(piece.data)
        sizes[-1] += len(piece.data)
        advance(len(piece.data))
    if sizes:
        keys.append(int.from_bytes(digest.digest()))
    index = FREE if split is None else SPLITS.index(split)
    return Scan(
        np.array(sizes, dtype=np.int64),
        np.array(keys, dtype=np.uint64),
        np.full(len(sizes), index, dtype=np.int8),
        np.full(len(sizes), part, dtype=np.int16),
    )


@dataclass(frozen=True)
class Plan:
    """Which part of which document belongs to which split.

    A fragment is a document, or a part of one that is divided between splits. Fragments are
    numbered in the order in which they are read.
    """

    cuts: dict[int, tuple[int, ...]]
    """Document -> bytes after which it is divided."""
    splits: np.ndarray
    """Index in SPLITS of each fragment, [m]."""
    parts: np.ndarray
    """Part of the corpus that each fragment belongs to, [m]."""
    ends: np.ndarray
    """Whether each fragment is the end of its document, [m] of bool."""
    order: np.ndarray
    """All fragments ordered by split, part and content, [m]."""

    def fragments(self, split: str) -> np.ndarray:
        """Return the fragments of a split in order."""
        found: np.ndarray = self.order[self.splits[self.order] == SPLITS.index(split)]
        return found


def plan_splits(
    scan: Scan, shares: tuple[float, float], edges: tuple[int, int] | None = None
) -> Plan:
    """Divide the documents without a split between train, validation and test.

    Each part is divided on its own. shares: of validation and test. edges: where validation and
    test start, in bytes, instead of the shares.

    An edge moves to the nearest boundary between two documents if there is one close to it.
    Otherwise it divides a document.
    """
    splits, parts = scan.splits.copy(), scan.parts
    cuts: dict[int, dict[int, int]] = {}  # document -> byte -> split that starts there
    for part in np.unique(parts[splits == FREE]):
        chosen = np.flatnonzero((splits == FREE) & (parts == part))
        chosen = chosen[np.argsort(scan.keys[chosen], kind="stable")]
        ends = np.cumsum(scan.sizes[chosen])
        found = _edges(ends, shares) if edges is None else edges
        starts = ends - scan.sizes[chosen]
        splits[chosen] = np.searchsorted(found, starts, side="right")
        for split, edge in enumerate(found, start=1):
            i = int(np.searchsorted(ends, edge, side="right"))
            if i < len(chosen) and starts[i] < edge:
                cuts.setdefault(int(chosen[i]), {})[int(edge - starts[i])] = split
    return _number_fragments(scan, splits, cuts)


def _edges(ends: np.ndarray, shares: Sequence[float]) -> tuple[int, int]:
    """Return where validation and test start. ends: of all documents, in bytes."""
    total = int(ends[-1])
    positive = [share for share in shares if share > 0]
    tolerance = EDGE_TOLERANCE * min(positive, default=0.0) * total
    found = []
    for edge in (round(total * (1 - shares[0] - shares[1])), round(total * (1 - shares[1]))):
        i = int(np.searchsorted(ends, edge))
        near = [int(end) for end in ends[max(i - 1, 0) : i + 1]]
        nearest = min(near, key=lambda end: abs(end - edge))
        found.append(nearest if abs(nearest - edge) <= tolerance else edge)
    return found[0], found[1]


def _number_fragments(scan: Scan, splits: np.ndarray, cuts: dict[int, dict[int, int]]) -> Plan:
    n_cuts = np.zeros(len(scan.sizes), dtype=np.int64)
    for document, at in cuts.items():
        n_cuts[document] = len(at)
    document_of = np.repeat(np.arange(len(scan.sizes)), n_cuts + 1)
    first = np.cumsum(n_cuts + 1) - (n_cuts + 1)
    offset = np.arange(len(document_of)) - first[document_of]
    split_of = splits[document_of]
    for document, at in cuts.items():
        split_of[first[document] + 1 :][: len(at)] = list(at.values())
    part_of = scan.parts[document_of]
    order = np.lexsort((offset, scan.keys[document_of], part_of, split_of))
    ends = offset == n_cuts[document_of]
    return Plan({n: tuple(at) for n, at in cuts.items()}, split_of, part_of, ends, order)
