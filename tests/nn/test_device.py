"""The mode a model is in while it is measured or writes, and memory that is kept."""

import ctypes

import pytest
import torch
from torch import nn

from transformer_vq.nn.device import evaluating, has_fast_bf16, keep_freed_memory


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_mode_as_it_was_whatever_happens(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training)

    def use() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(2)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert all(module.training == training for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("takes_thresholds", "want"),
    # Pieces by mmap from 2 GB on, or none at all; nothing trimmed.
    [(1, [(-3, 2**31 - 1), (-1, -1)]), (0, [(-4, 0), (-3, 2**31 - 1), (-1, -1)])],
)
def test_glibc_is_told_to_keep_large_pieces(monkeypatch, takes_thresholds, want):
    calls = []

    class Library:
        def __init__(self, name):
            pass

        def mallopt(self, number, value):
            calls.append((number, value))
            return takes_thresholds

    monkeypatch.setattr(ctypes, "CDLL", Library)
    keep_freed_memory()
    assert sorted(calls) == want


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
    assert torch.zeros(3).sum() == 0


@pytest.mark.parametrize(
    ("found", "fast"), [({"amx_bf16": True}, True), ({"bf16": True}, True), ({"avx2": True}, False)]
)
def test_a_processor_says_whether_it_has_bf16(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert has_fast_bf16(torch.device("cpu")) == fast
    assert has_fast_bf16(torch.device("cuda"))
