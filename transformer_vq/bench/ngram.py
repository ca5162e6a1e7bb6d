"""What counting bytes reaches: models of order 0 and 2, for a trained model to be measured against.

The next byte is predicted from how often it followed the last bytes in the training split; an
order backs off to the one below as Witten and Bell do, by how many different bytes followed.
"""

from __future__ import annotations

import numpy as np

from transformer_vq.data.corpus import Corpus
from transformer_vq.errors import UserError

N = 256


def bits_per_byte(corpus: Corpus, split: str = "test") -> dict[int, float]:
    """Bits per byte of the models of order 0, 1 and 2, learned from the training split."""
    if corpus.vocab_size != N:
        raise UserError(f"{corpus.dataset} is not made of bytes")
    train, test = (np.asarray(corpus.split(name).tokens) for name in ("train", split))
    p = np.full(len(test), 1 / N)
    bits = {}
    for order in (0, 1, 2):
        p = _mix(p, *_counts(train, test, order))
        bits[order] = float(-np.log2(p).mean())
    return bits


def _mix(
    below: np.ndarray, n_followed: np.ndarray, n_context: np.ndarray, n_kinds: np.ndarray
) -> np.ndarray:
    """Witten-Bell: the more different bytes followed a context, the more the order below counts."""
    seen = n_context > 0
    mixed = (n_followed + n_kinds * below) / np.maximum(n_context + n_kinds, 1)
    return np.where(seen, mixed, below)


def _counts(
    train: np.ndarray, test: np.ndarray, order: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every byte of `test`: how often it followed its context in `train`, how often the context
    came, and how many different bytes followed it."""
    table = np.bincount(_codes(train, order), minlength=N ** (order + 1)).reshape(-1, N)
    code = _codes(test, order)
    context = code // N
    return table.reshape(-1)[code], table.sum(1)[context], (table > 0).sum(1)[context]


def _codes(data: np.ndarray, order: int) -> np.ndarray:
    """Each byte and the `order` bytes before it as one number; zeros stand before the first."""
    code = np.zeros(len(data), dtype=np.int64)
    for back in range(order, -1, -1):
        shifted = np.concatenate([np.zeros(back, dtype=data.dtype), data[: len(data) - back]])
        code = code * N + shifted
    return code
