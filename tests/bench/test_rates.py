"""Matrix-product rates are measured in bounded time on any CPU; the clock is fake."""

import math

import pytest
import torch

import measure as rates

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only matrix products advance, at `speeds` FLOPs per second; records them."""

    class Clock:
        def __init__(self):
            self.now = 0.0
            self.speeds = {torch.float32: 1e8, torch.bfloat16: 1e8}
            self.products = []

        def multiply(self, a, b):
            flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            self.products.append((a.dtype, flops))
            self.now += flops / self.speeds[a.dtype]

    clock = Clock()
    monkeypatch.setattr(rates, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "mm", clock.multiply)
    monkeypatch.setattr(rates, "PROBE", (8, 8, 8))
    monkeypatch.setattr(rates, "SHAPES", ((64, 64, 64), (32, 32, 32), (128, 64, 32)))
    return clock


def test_fast_precision_is_measured_with_all_shapes(clock):
    assert rates.matmul_rates(CPU, ["fp32"]) == {"fp32": pytest.approx(1e8)}
    flops = {2 * math.prod(shape) for shape in (rates.PROBE, *rates.SHAPES)}
    assert set(clock.products) == {(torch.float32, n) for n in flops}
    assert clock.now <= rates.BUDGET


def test_emulated_precision_stays_within_its_budget(clock):
    clock.speeds = {torch.float32: 1e8, torch.bfloat16: 5e4}
    found = rates.matmul_rates(CPU, ["fp32", "bf16"])
    assert found == {"fp32": pytest.approx(1e8), "bf16": pytest.approx(5e4)}
    emulated = [flops for dtype, flops in clock.products if dtype == torch.bfloat16]
    assert sum(emulated) / 5e4 <= rates.BUDGET
    assert max(emulated) == 2 * 32**3  # larger products would exceed the budget


@pytest.mark.parametrize(
    ("used", "has_bf16", "want"),
    [
        (["fp32"], False, ["fp32"]),
        (["fp32"], True, ["fp32", "bf16"]),
        (["bf16", "bf16"], False, ["fp32", "bf16"]),
        ([], False, ["fp32"]),
    ],
)
def test_bf16_is_measured_only_if_it_is_used_or_fast(used, has_bf16, want, monkeypatch):
    monkeypatch.setattr(rates, "has_fast_bf16", lambda device: has_bf16)
    assert rates.precisions_to_measure(CPU, used) == want
