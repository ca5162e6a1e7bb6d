"""Windows for truncated BPTT: which tokens an update sees follows from its number alone.

Every token of a split is a target once per epoch; its input is the token before it, or `bos` where
a document begins, so nothing is predicted across a boundary. A split is cut into sequences of T
tokens, shuffled anew each epoch; a batch of sequences is worked on in windows of W tokens, the
state carried from one to the next. So the cursor of a run is one number, that of its updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from transformer_vq.data.corpus import Split
from transformer_vq.data.sources.base import DataError


@dataclass(frozen=True)
class Batch:
    """tokens, targets: [b, w]; valid and document_ids as the model takes them, None if needless."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """How many tokens of its context stand before each token, [b, w]."""
    valid: Tensor | None = None
    document_ids: Tensor | None = None
    key_priority: Tensor | None = None
    """Random numbers, [b, w] of int64: the keys of the lowest may become codes."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """`fn` applied to every tensor: a choice of rows, a move to another device."""
        parts = [getattr(self, part.name) for part in fields(self)]
        return Batch(*(None if x is None else fn(x) for x in parts))  # type: ignore[arg-type]

    @property
    def n_targets(self) -> int:
        return self.targets.numel() if self.valid is None else int(self.valid.sum())


def read_rows(
    split: Split, begins: np.ndarray, ends: np.ndarray, offset: int, n: int, documents: bool
) -> Batch:
    """n tokens of each context begins[i] to ends[i], from `offset` on; beyond the end is padding.

    documents: give ids, because several documents may lie in one context.
    """
    at = begins[:, None] + offset + np.arange(n)  # [b, n] places of the targets
    valid = at < ends[:, None]
    at = np.where(valid, at, begins[:, None])
    document = np.searchsorted(split.starts, at, side="right") - 1
    start = split.starts[document]
    inputs = np.where(start == at, split.bos, split.tokens[np.maximum(at - 1, 0)])
    return Batch(
        tokens=torch.from_numpy(inputs.astype(np.int64)),
        targets=torch.from_numpy(split.tokens[at].astype(np.int64)),
        positions=torch.from_numpy(at - np.maximum(start, begins[:, None])),
        valid=None if valid.all() else torch.from_numpy(valid),
        document_ids=torch.from_numpy(document) if documents else None,
    )


def cuts_documents(split: Split, seq_len: int) -> bool:
    """Whether some sequence of `seq_len` tokens holds more than one document."""
    return bool(np.any(np.asarray(split.starts) % seq_len))


class TrainingBatches:
    """The windows of all updates of a run: `batches[update]`."""

    def __init__(
        self, split: Split, batch_size: int, seq_len: int, backprop_len: int, seed: int = 0
    ) -> None:
        if len(split) < seq_len:
            raise DataError(
                f"the training split has {len(split):,} tokens, fewer than one sequence of "
                f"{seq_len:,}; use more data, or a smaller train.seq_len and train.backprop_len"
            )
        self.split = split
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.backprop_len = backprop_len
        self.seed = seed
        self.n_windows = seq_len // backprop_len
        self.n_sequences = -(-len(split) // seq_len)
        self._documents = cuts_documents(split, seq_len)
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def begins(self, update: int) -> bool:
        """Whether this update starts new sequences, with a fresh state."""
        return update % self.n_windows == 0

    def __getitem__(self, update: int) -> Batch:
        number, window = divmod(update, self.n_windows)
        places = number * self.batch_size + np.arange(self.batch_size)
        sequences = np.array([self._sequence(int(place)) for place in places])
        begin = sequences * self.seq_len
        end = np.minimum(begin + self.seq_len, len(self.split))
        offset = window * self.backprop_len
        return read_rows(self.split, begin, end, offset, self.backprop_len, self._documents)

    def _sequence(self, place: int) -> int:
        """The sequence that comes as `place`-th in the whole run; epochs follow without a gap."""
        epoch, within = divmod(place, self.n_sequences)
        return int(self._order(epoch)[within])

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_sequences)
