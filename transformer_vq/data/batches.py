"""Batches for truncated BPTT; the batch of a step is a function of the step number.

Each token of a split is a target once per epoch. Its input is the preceding token, or `bos` at the
start of a document, so nothing is predicted across documents. A split is cut into sequences of
`seq_len` tokens, which are shuffled in each epoch. A batch of sequences is processed in windows of
`backprop_len` tokens, and the model state is carried from one window to the next. To resume, a run
needs the step number only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from transformer_vq.data.corpus import Split
from transformer_vq.data.sources.base import DataError


@dataclass(frozen=True)
class Batch:
    """One window of several sequences: tokens and targets, [b, w], and arguments of the model."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """Number of preceding tokens in the context of each token, [b, w]."""
    valid: Tensor | None = None
    """False for padding, [b, w]; None if there is no padding."""
    document_ids: Tensor | None = None
    """[b, w]; None if each sequence contains a single document."""
    key_priority: Tensor | None = None
    """Random int64 numbers, [b, w]; the keys with the lowest numbers may become codes."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `fn` to every tensor, for example to select rows or to move them to a device."""
        tensors = [getattr(self, field.name) for field in fields(self)]
        return Batch(*(None if x is None else fn(x) for x in tensors))  # type: ignore[arg-type]

    @property
    def n_targets(self) -> int:
        """Number of targets without padding."""
        return self.targets.numel() if self.valid is None else int(self.valid.sum())


def read_rows(
    split: Split,
    starts: np.ndarray,
    ends: np.ndarray,
    offset: int,
    length: int,
    with_document_ids: bool,
) -> Batch:
    """Return the targets offset to offset + length of each context, with their inputs.

    starts, ends: [b], the range of each context in the split; targets after its end are padding.
    with_document_ids: needed if a context may contain more than one document.
    """
    at = starts[:, None] + offset + np.arange(length)  # [b, length] indices of the targets
    valid = at < ends[:, None]
    at = np.where(valid, at, starts[:, None])
    document = np.searchsorted(split.starts, at, side="right") - 1
    document_start = split.starts[document]
    inputs = np.where(document_start == at, split.bos, split.tokens[np.maximum(at - 1, 0)])
    return Batch(
        tokens=torch.from_numpy(inputs.astype(np.int64)),
        targets=torch.from_numpy(split.tokens[at].astype(np.int64)),
        positions=torch.from_numpy(at - np.maximum(document_start, starts[:, None])),
        valid=None if valid.all() else torch.from_numpy(valid),
        document_ids=torch.from_numpy(document) if with_document_ids else None,
    )


def packs_documents(split: Split, seq_len: int) -> bool:
    """Return whether any sequence of `seq_len` tokens contains more than one document."""
    return bool(np.any(np.asarray(split.starts) % seq_len))


@dataclass(frozen=True)
class _Part:
    """The range of tokens from start to end, cut into sequences."""

    start: int
    end: int
    seq_len: int

    @property
    def n_sequences(self) -> int:
        return -(-(self.end - self.start) // self.seq_len)

    def range(self, sequence: int) -> tuple[int, int]:
        start = self.start + sequence * self.seq_len
        return start, min(start + self.seq_len, self.end)

    def packs_documents(self, starts: np.ndarray) -> bool:
        """Return whether a document starts inside a sequence."""
        first, last = np.searchsorted(starts, (self.start, self.end))
        return bool(np.any((np.asarray(starts[first:last]) - self.start) % self.seq_len))


class TrainingBatches:
    """The batches of a run; `batches[step]` is one window of `batch_size` sequences.

    weights: one number per part of the split; how often its sequences are trained on, relative to
    the others. Without weights, each sequence is used once per epoch.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seq_len: int,
        backprop_len: int,
        seed: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.backprop_len = backprop_len
        self.seed = seed
        self.n_windows = seq_len // backprop_len
        sizes = split.parts if weights else (len(split),)
        if min(sizes) < seq_len:
            part = f" of --data.path {sizes.index(min(sizes)) + 1}" if weights else ""
            raise DataError(
                f"the training split{part} has {min(sizes):,} tokens, fewer than one sequence of "
                f"{seq_len:,}; use more data, or a smaller train.seq_len and train.backprop_len"
            )
        ends = np.cumsum(sizes)
        self._parts = [
            _Part(int(end) - size, int(end), seq_len) for size, end in zip(sizes, ends, strict=True)
        ]
        exact = [Fraction(weight) for weight in weights or (1.0,)]
        self._shares = [weight / sum(exact) for weight in exact]
        self._with_document_ids = any(part.packs_documents(split.starts) for part in self._parts)
        self._order = lru_cache(maxsize=2 * len(sizes))(self._shuffle)

    @property
    def n_sequences(self) -> int:
        """Number of sequences in the split."""
        return sum(part.n_sequences for part in self._parts)

    def starts_sequences(self, step: int) -> bool:
        """Return whether a step starts new sequences, which need a new state."""
        return step % self.n_windows == 0

    def __getitem__(self, step: int) -> Batch:
        number, window = divmod(step, self.n_windows)
        positions = number * self.batch_size + np.arange(self.batch_size)
        ranges = np.array([self._sequence(int(position)) for position in positions])
        starts, ends = ranges[:, 0], ranges[:, 1]
        offset = window * self.backprop_len
        return read_rows(
            self.split, starts, ends, offset, self.backprop_len, self._with_document_ids
        )

    def _sequence(self, position: int) -> tuple[int, int]:
        """Return the range of the sequence at a position in the order of the run.

        Batches may span epochs. With weights, parts have epochs of their own.
        """
        number, count = self._part_of(position)
        part = self._parts[number]
        epoch, within = divmod(count, part.n_sequences)
        return part.range(int(self._order(number, epoch)[within]))

    def _part_of(self, position: int) -> tuple[int, int]:
        """Return the part of a position, and how many earlier positions have the same part.

        Parts are interleaved evenly: of the first n positions, floor(n * share) belong to the first
        part. The others are divided between the other parts in the same way.
        """
        rest = Fraction(1)
        for number, share in enumerate(self._shares[:-1]):
            taken, after = (math.floor(n * share / rest) for n in (position, position + 1))
            if after > taken:
                return number, taken
            position -= taken
            rest -= share
        return len(self._shares) - 1, position

    def _shuffle(self, part: int, epoch: int) -> np.ndarray:
        # Part 0 has the key of runs without parts.
        key = [self.seed, epoch, part] if part else [self.seed, epoch]
        return np.random.default_rng(key).permutation(self._parts[part].n_sequences)
