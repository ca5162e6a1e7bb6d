"""How fast this machine multiplies matrices: what the speed of a model is measured against.

The time this takes is bounded on any CPU, also where a precision is emulated at a thousandth of
the usual rate: a small product predicts what a larger one costs, and shapes that would exceed the
budget are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from transformer_vq.bench.cells import synchronize
from transformer_vq.device import has_fast_bf16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROBE = (256, 256, 256)
# (m, k, n): squares, and tokens by widths as a model has them
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 768, 3072))
ACCELERATOR_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (32_768, 2048, 8192))
SECONDS = 0.1  # that one timing lasts at least
BUDGET = 8.0  # seconds per precision
TIME_LIMIT = 120.0  # seconds of the subprocess that measures, including its start


def precisions_to_measure(device: torch.device, used: Sequence[str]) -> list[str]:
    """Return fp32, what is used, and bf16 where the device has instructions for it."""
    wanted = {"fp32", *used} | ({"bf16"} if has_fast_bf16(device) else set())
    return [name for name in DTYPES if name in wanted]


def matmul_rates(
    device: torch.device, precisions: Sequence[str], repeats: int = 3
) -> dict[str, Any]:
    """Return the FLOPs per second of the fastest shape, for each precision."""
    shapes = SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES
    return {name: _best_rate(device, DTYPES[name], shapes, repeats) for name in precisions}


def _best_rate(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], repeats: int
) -> float:
    """Return the best rate of the probe and of all shapes that fit into the budget."""
    deadline = perf_counter() + BUDGET
    best = _rate(device, dtype, PROBE, 1, deadline)
    # Small shapes first: the probe may be far slower than what the device can do.
    for shape in sorted(shapes, key=math.prod):
        seconds = 2 * math.prod(shape) / best
        predicted = 2 * seconds + repeats * (SECONDS + seconds)
        if perf_counter() + predicted <= deadline:
            best = max(best, _rate(device, dtype, shape, repeats, deadline))
    return best


def _rate(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    repeats: int,
    deadline: float,
) -> float:
    """Return the best of several timings; after the deadline no further one is started."""
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)

    def seconds(times: int) -> float:
        synchronize(device)
        start = perf_counter()
        for _ in range(times):
            torch.mm(a, b)
        synchronize(device)
        return (perf_counter() - start) / times

    timings = [seconds(1)]  # a warm-up, then one product to see how many a timing needs
    times = 1
    while len(timings) < 2 + repeats and perf_counter() < deadline:
        timings.append(seconds(times))
        times = math.ceil(SECONDS / timings[1])
    return 2 * m * k * n / min(timings[2:] or timings)
