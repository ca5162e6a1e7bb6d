"""The tasks of `benchmarks/recall.py`: what is scored, and what it depends on."""

from collections import Counter

import numpy as np
import pytest
import torch

from recall_tasks import (
    MARK,
    VOCAB_SIZE,
    RecallData,
    RecallSettings,
)

TASKS = ["mqar", "copy", "needle"]


def solve_mqar(tokens, n):
    """Predict the value that followed the same key at the start."""
    values = dict(zip(tokens[: 2 * n : 2], tokens[1 : 2 * n : 2], strict=True))
    return [values.get(token, -1) for token in tokens]


def solve_copy(tokens, n):
    """Predict the token that followed the first occurrence of this token."""
    return [tokens[tokens.index(token) + 1] for token in tokens]


def solve_needle(tokens, n):
    """Predict the token at the same distance from the first mark."""
    first, last = tokens.index(MARK), len(tokens) - 1 - tokens[::-1].index(MARK)
    return [tokens[first + i - last + 1] if i >= last else -1 for i in range(len(tokens))]


SOLVERS = {
    "mqar": (solve_mqar, "pairs", 16),
    "copy": (solve_copy, "copied", 16),
    "needle": (solve_needle, "value_len", 4),
}


@pytest.mark.parametrize("length", [64, 301])
@pytest.mark.parametrize("task", TASKS)
def test_scored_targets_follow_from_the_tokens_before_them(task, length):
    solver, field, n = SOLVERS[task]
    assert getattr(RecallSettings(), field) == n
    batch = RecallData(task, RecallSettings()).batch([3], 7, length)
    assert batch.tokens.shape == batch.targets.shape == batch.scored.shape == (7, length)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert 0 <= batch.tokens.min() <= batch.targets.max() < VOCAB_SIZE
    for tokens, targets, scored in zip(*map(torch.unbind, vars(batch).values()), strict=True):
        assert scored.sum() == n
        for i in scored.nonzero().flatten().tolist():
            answer = solver(tokens[: i + 1].tolist(), n)[-1]
            assert answer == targets[i]


@pytest.mark.parametrize("task", TASKS)
def test_batch_is_a_function_of_the_seed(task):
    data = RecallData(task, RecallSettings())
    first = data.batch([1, 2], 4, 100)
    assert all(map(torch.equal, vars(first).values(), vars(data.batch([1, 2], 4, 100)).values()))
    assert not torch.equal(first.tokens, data.batch([1, 3], 4, 100).tokens)
    assert not torch.equal(first.tokens, data.batch([1, 2], 4, 100, held_out=True).tokens)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 4


def test_needle_in_text_keeps_the_last_tenth_for_the_evaluation():
    text = np.frombuffer(b"a" * 900 + b"b" * 100, dtype=np.uint8)
    data = RecallData("needle", RecallSettings(), text)
    assert data.vocab_size == 257
    for held_out, byte in ((False, b"a"), (True, b"b")):
        batch = data.batch([0], 8, 50, held_out)
        assert batch.scored.sum() == 8 * 4
        noise = Counter(batch.tokens.flatten().tolist()).most_common(1)[0]
        assert noise[0] == byte[0] + 1
        assert noise[1] > 8 * 35
    assert RecallData("copy", RecallSettings(), text).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("task", TASKS)
def test_sequence_that_is_too_short_is_rejected(task):
    settings = RecallSettings(pairs=2, copied=4, value_len=2)
    shortest = settings.min_len(task)
    data = RecallData(task, settings)
    assert data.batch([0], 1, shortest).scored.any()
    with pytest.raises(ValueError, match=f"at least {shortest} tokens"):
        data.batch([0], 1, shortest - 1)


def test_training_lengths_grow_to_train_len():
    settings = RecallSettings(train_len=300, block_len=20)
    assert settings.train_lengths(quantized=False) == [16, 32, 64]
    assert settings.train_lengths(quantized=True) == [64, 128, 256, 300]
    short = RecallSettings(train_len=40)
    assert short.train_lengths(quantized=False) == [16, 32]
    assert short.train_lengths(quantized=True) == [40]
    for length in (16, 32, 64, 128):
        assert all(settings.at(length).min_len(task) <= length for task in TASKS)
    assert settings.at(300) == settings
