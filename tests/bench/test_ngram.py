"""N-gram models, compared with a loop in plain Python."""

import math
import random
from collections import Counter, defaultdict
from itertools import islice

import numpy as np
import pytest

from ngram import bits_by_order


def by_hand(train, test, order):
    """Return bits per byte with Witten-Bell smoothing, one byte at a time."""
    followed = defaultdict(Counter)
    padded = [0] * order + train
    for n in range(order + 1):
        for i in range(order, len(padded)):
            followed[n, tuple(padded[i - n : i])][padded[i]] += 1
    bits = 0.0
    padded = [0] * order + test
    for i in range(order, len(padded)):
        p = 1 / 257
        for n in range(order + 1):
            seen = followed[n, tuple(padded[i - n : i])]
            if seen:
                p = (seen[padded[i]] + len(seen) * p) / (sum(seen.values()) + len(seen))
        bits -= math.log2(p)
    return bits / sum(token < 256 for token in test)


@pytest.mark.parametrize("alphabet", [(0, 1), (0, 97, 256), tuple(range(257))])
def test_bits_by_order_equals_a_loop_in_plain_python_up_to_order_5(alphabet):
    generator = random.Random(0)
    train, *tests = (generator.choices(alphabet, k=n) for n in (3000, 500, 1, 40))
    arrays = [np.array(tokens, dtype=np.uint16) for tokens in (train, *tests)]
    bits = list(islice(bits_by_order(arrays[0], arrays[1:]), 6))
    assert len(bits) == 6
    for order, got in enumerate(bits):
        for test, found in zip(tests, got, strict=True):
            n_bytes = sum(token < 256 for token in test)
            assert found / n_bytes == pytest.approx(by_hand(train, test, order), rel=1e-12)


def test_bits_by_order_accepts_an_empty_text_and_an_unseen_one():
    train, empty, unseen = ([5, 5], [], [7, 7])
    arrays = [np.array(tokens, dtype=np.uint16) for tokens in (train, empty, unseen)]
    _, _, order_2 = islice(bits_by_order(arrays[0], arrays[1:]), 3)
    assert order_2 == [0.0, pytest.approx(2 * by_hand(train, unseen, 2))]
