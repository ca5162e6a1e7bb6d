"""Byte-level n-gram models of order 0 to 2: the baseline for a trained model.

The next byte is predicted from its counts after the preceding bytes in the training split. Each
order is interpolated with the order below by Witten-Bell smoothing.
"""

from __future__ import annotations

import numpy as np

from transformer_vq.data.corpus import Corpus
from transformer_vq.errors import UserError

N = 257  # bytes and the end of a document


def bits_per_byte(corpus: Corpus, split: str = "test") -> dict[int, float]:
    """Return the bits per byte of orders 0, 1 and 2, counted on the training split."""
    if corpus.tokenizer_sha256 is not None or corpus.vocab_size > N:
        raise UserError(f"{corpus.dataset} is not a byte-level corpus; use bytes as tokens")
    train, test = (np.asarray(corpus.split(name).tokens) for name in ("train", split))
    p = np.full(len(test), 1 / corpus.vocab_size)
    bits = {}
    for order in (0, 1, 2):
        p = _smooth(p, *_counts(train, test, order))
        bits[order] = float(-np.log2(p).sum()) / corpus.sizes[split].bytes
    return bits


def _smooth(
    below: np.ndarray, n_followed: np.ndarray, n_context: np.ndarray, n_distinct: np.ndarray
) -> np.ndarray:
    """Return Witten-Bell probabilities; `below` are the probabilities of the order below.

    The order below gets more weight after contexts that were followed by many distinct bytes.
    """
    seen = n_context > 0
    mixed = (n_followed + n_distinct * below) / np.maximum(n_context + n_distinct, 1)
    return np.where(seen, mixed, below)


def _counts(
    train: np.ndarray, test: np.ndarray, order: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three counts in `train` for every byte of `test`.

    These are: the byte after its context, the context, and the distinct bytes after the context.
    """
    table = np.bincount(_codes(train, order), minlength=N ** (order + 1)).reshape(-1, N)
    code = _codes(test, order)
    context = code // N
    return table.reshape(-1)[code], table.sum(1)[context], (table > 0).sum(1)[context]


def _codes(data: np.ndarray, order: int) -> np.ndarray:
    """Return each byte and its `order` predecessors as one integer; the data is zero-padded."""
    code = np.zeros(len(data), dtype=np.int64)
    for back in range(order, -1, -1):
        shifted = np.concatenate([np.zeros(back, dtype=data.dtype), data[: len(data) - back]])
        code = code * N + shifted
    return code
