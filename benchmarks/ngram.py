"""Byte-level n-gram models of any order: the baseline for a trained model.

The next byte is predicted from its counts after the preceding bytes in the training text. Each
order is interpolated with the order below by Witten-Bell smoothing. The counts are static: they do
not adapt to the text that is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from transformer_vq.data.corpus import Corpus
from transformer_vq.errors import UserError

N = 257  # bytes and the end of a document


def bits_per_byte(corpus: Corpus, split: str = "test") -> dict[int, float]:
    """Return the bits per byte of orders 0, 1 and 2, counted on the training split."""
    if corpus.tokenizer_sha256 is not None or corpus.vocab_size > N:
        raise UserError(f"{corpus.dataset} is not a byte-level corpus; use bytes as tokens")
    train, test = (np.asarray(corpus.split(name).tokens) for name in ("train", split))
    found = islice(bits_by_order(train, [test], corpus.vocab_size), 3)
    return {order: bits / corpus.sizes[split].bytes for order, (bits,) in enumerate(found)}


def bits_by_order(
    train: np.ndarray, tests: Sequence[np.ndarray], vocab_size: int = N
) -> Iterator[list[float]]:
    """Yield the bits of every test text for order 0, then for order 1, and so on without end.

    train, tests: tokens below `vocab_size`; zeros are assumed before each text.

    A gram is a token with its predecessors. The grams of the training text are numbered by sorting,
    and a gram of order k is the number of a gram of order k - 1, followed by a token. So its code
    fits in 64 bits for any order, and memory grows with the text, not with the vocabulary.
    """
    tokens, test_tokens = _padded(train), [_padded(test) for test in tests]
    numbers = np.zeros_like(tokens)  # of the gram that ends at each token; -1 if it is unknown
    test_numbers = [np.zeros_like(test) for test in test_tokens]
    probabilities = [np.full(len(test), 1 / vocab_size) for test in tests]
    n_grams = 1  # of the order below
    while True:
        grams, numbers = _distinct(_codes(numbers, tokens))
        n_followed = np.bincount(numbers[1:], minlength=len(grams))
        contexts = grams // N
        n_context = np.bincount(contexts, n_followed, n_grams)
        n_distinct = np.bincount(contexts, n_followed > 0, n_grams)
        for i, test in enumerate(test_tokens):
            codes = _codes(test_numbers[i], test)
            places = np.searchsorted(grams, codes).clip(max=len(grams) - 1)
            test_numbers[i] = np.where(grams[places] == codes, places, -1)
            number, context = test_numbers[i][1:], codes[1:] // N
            probabilities[i] = _smooth(
                probabilities[i],
                np.where(number < 0, 0, n_followed[number]),
                np.where(context < 0, 0, n_context[context]),
                n_distinct[context],
            )
        n_grams = len(grams)
        yield [float(-np.log2(p).sum()) for p in probabilities]


def _smooth(
    below: np.ndarray, n_followed: np.ndarray, n_context: np.ndarray, n_distinct: np.ndarray
) -> np.ndarray:
    """Return Witten-Bell probabilities; `below` are the probabilities of the order below.

    The counts in the training text are: the token after its context, the context, and the distinct
    tokens after the context. The order below gets more weight after contexts that were followed by
    many distinct tokens.
    """
    seen = n_context > 0
    mixed = (n_followed + n_distinct * below) / np.maximum(n_context + n_distinct, 1)
    return np.where(seen, mixed, below)


def _padded(tokens: np.ndarray) -> np.ndarray:
    """Return tokens after a zero, which also represents all zeros before it."""
    return np.concatenate([np.zeros(1, dtype=np.int64), tokens])


def _codes(numbers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return each gram as one integer. numbers: of the grams of the order below."""
    # All tokens before the first one are zeros, as the first one, so its context is its own gram.
    code: np.ndarray = np.concatenate([numbers[:1], numbers[:-1]]) * N + tokens
    return code


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct codes in order, and for each code its place among them.

    The same as np.unique(codes, return_inverse=True), but several times as fast: codes and
    positions are sorted as one integer, which needs no indirect sort.
    """
    bits = len(codes).bit_length()
    if int(codes.max()).bit_length() + bits > 63:
        raise UserError("the training text is too large for n-grams of this order; use less text")
    packed = codes << bits
    packed |= np.arange(len(codes))
    packed.sort()
    positions = packed & ((1 << bits) - 1)
    packed >>= bits
    is_first = np.append(True, packed[1:] != packed[:-1])
    places = np.empty_like(codes)
    places[positions] = np.cumsum(is_first) - 1
    return packed[is_first], places
