"""Batches for truncated BPTT; the batch of a step is a function of the step number.

Each token of a split is a target once per epoch. Its input is the preceding token, or `bos` at the
start of a document, so nothing is predicted across documents. A split is cut into sequences of
`seq_len` tokens, which are shuffled in each epoch. A batch of sequences is processed in spans of
`backprop_len` tokens, and the model state is carried from one span to the next. To resume, a run
needs the step number only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from transformer_vq.data.corpus import Split
from transformer_vq.data.paths import DataError


@dataclass(frozen=True)
class Batch:
    """One span of several sequences: tokens and targets, [b, w], and arguments of the model."""

    tokens: Tensor
    targets: Tensor
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
    before = split.read(np.maximum(at - 1, document_start), document)
    inputs = np.where(document_start == at, split.bos, before)
    return Batch(
        tokens=torch.from_numpy(inputs.astype(np.int64)),
        targets=torch.from_numpy(split.read(at, document).astype(np.int64)),
        valid=None if valid.all() else torch.from_numpy(valid),
        document_ids=torch.from_numpy(document) if with_document_ids else None,
    )


def read_positions(split: Split, starts: np.ndarray, offset: int, length: int) -> Tensor:
    """Return how many tokens of its document precede each target of `read_rows` in its context."""
    at = starts[:, None] + offset + np.arange(length)
    document_start = split.starts[np.searchsorted(split.starts, at, side="right") - 1]
    return torch.from_numpy(at - np.maximum(document_start, starts[:, None]))


def packs_documents(split: Split, seq_len: int) -> bool:
    """Return whether any sequence of `seq_len` tokens contains more than one document."""
    return bool(np.any(np.asarray(split.starts) % seq_len))


class TrainingBatches:
    """The batches of a run; `batches[step]` is one span of `batch_size` sequences."""

    def __init__(
        self, split: Split, batch_size: int, seq_len: int, backprop_len: int, seed: int = 0
    ) -> None:
        if len(split) < seq_len:
            raise DataError(
                f"the training split has {len(split):,} tokens, fewer than one sequence of "
                f"{seq_len:,}; use more data, or a smaller train.seq_len and train.backprop_len"
            )
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self.seq_len, self.backprop_len = seq_len, backprop_len
        self.n_spans = seq_len // backprop_len
        self._with_document_ids = packs_documents(split, seq_len)
        self._order = lru_cache(maxsize=2)(self._shuffle)

    @property
    def n_sequences(self) -> int:
        """Number of sequences in the split; the last one may be shorter."""
        return -(-len(self.split) // self.seq_len)

    def starts_sequences(self, step: int) -> bool:
        """Return whether a step starts new sequences, which need a new state."""
        return step % self.n_spans == 0

    def __getitem__(self, step: int) -> Batch:
        return self.read(step, range(self.batch_size))[0]

    def read(self, step: int, rows: Sequence[int]) -> tuple[Batch, int]:
        """Return some rows of the batch of a step, and the number of targets of all rows."""
        number, span = divmod(step, self.n_spans)
        first, offset, n = number * self.batch_size, span * self.backprop_len, self.backprop_len
        # Positions in the order of the run; a batch may span epochs.
        places = [divmod(i, self.n_sequences) for i in range(first, first + self.batch_size)]
        starts = np.array([self._order(epoch)[i] for epoch, i in places]) * self.seq_len
        ends = np.minimum(starts + self.seq_len, len(self.split))
        n_targets = int((ends - starts - offset).clip(0, n).sum())
        own = starts[list(rows)], ends[list(rows)]
        return read_rows(self.split, *own, offset, n, self._with_document_ids), n_targets

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_sequences)
