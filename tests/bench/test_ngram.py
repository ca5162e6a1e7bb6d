"""N-gram models, compared with a loop in plain Python."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from helpers import tiny_run

from transformer_vq.bench.ngram import bits_per_byte
from transformer_vq.data.corpus import prepare


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


def test_bits_per_byte_equals_a_loop_in_plain_python(tmp_path):
    corpus = prepare(tiny_run(tmp_path).data)
    train, test = (corpus.split(name).tokens.tolist() for name in ("train", "test"))
    got = bits_per_byte(corpus)
    for order in (0, 1, 2):
        assert got[order] == pytest.approx(by_hand(train, test, order), rel=1e-12)
    assert got[0] > got[1] > got[2] > 0


def test_bits_per_byte_rejects_a_corpus_that_is_not_bytes(tmp_path):
    corpus = replace(prepare(tiny_run(tmp_path).data), vocab_size=300)
    with pytest.raises(ValueError, match="not a byte-level corpus"):
        bits_per_byte(corpus)
