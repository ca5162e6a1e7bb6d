"""Matrix-product rates and read bandwidth of this machine: the references for the speed of a model.

The measurement takes bounded time on any CPU, even if it emulates a precision at a thousandth of
the usual rate. A small product predicts the time of larger ones; shapes that would exceed the
budget are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch

from transformer_vq.bench.cells import seconds_per_call
from transformer_vq.device import has_fast_bf16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROBE = (256, 256, 256)
# (m, k, n): square matrices, and tokens times typical layer widths
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 768, 3072))
ACCELERATOR_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (32_768, 2048, 8192))
BANDWIDTH_ROWS, BANDWIDTH_COLUMNS = 16_384, 4096  # 268 MB, more than any cache
SECONDS = 0.1  # minimum duration of one timing
BUDGET = 8.0  # seconds per precision
TIME_LIMIT = 120.0  # seconds for the measuring subprocess, including its start


def precisions_to_measure(device: torch.device, used: Sequence[str]) -> list[str]:
    """Return fp32, the precisions in use, and bf16 if the device has instructions for it."""
    wanted = {"fp32", *used} | ({"bf16"} if has_fast_bf16(device) else set())
    return [name for name in DTYPES if name in wanted]


def matmul_rates(
    device: torch.device, precisions: Sequence[str], repeats: int = 3
) -> dict[str, float]:
    """Return the FLOPs per second of the fastest shape, by precision."""
    shapes = SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES
    return {name: _best_rate(device, DTYPES[name], shapes, repeats) for name in precisions}


def bandwidth_probe(device: torch.device, repeats: int = 5) -> Callable[[], float]:
    """Return a function that measures the read bandwidth in bytes per second.

    It is what a large matrix-vector product reads, the best of several.
    """
    matrix = torch.ones(BANDWIDTH_ROWS, BANDWIDTH_COLUMNS, device=device)
    vector = torch.ones(BANDWIDTH_COLUMNS, device=device)

    def measure() -> float:
        product = partial(torch.mv, matrix, vector)
        seconds = [seconds_per_call(product, 1, device) for _ in range(1 + repeats)]
        return matrix.nbytes / min(seconds[1:])  # the first is a warm-up

    return measure


def _best_rate(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], repeats: int
) -> float:
    """Return the best rate of the probe and of the shapes that fit into the budget."""
    deadline = perf_counter() + BUDGET
    best = _rate(device, dtype, PROBE, 1, deadline)
    # Small shapes first: the rate of the probe may be far below the peak rate.
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
    """Return the best rate of several timings; start none after the deadline."""
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)

    def seconds(n_products: int) -> float:
        return seconds_per_call(lambda: torch.mm(a, b), n_products, device)

    # A warm-up, then a single product, which determines how many products a timing needs.
    timings = [seconds(1)]
    n_products = 1
    while len(timings) < 2 + repeats and perf_counter() < deadline:
        timings.append(seconds(n_products))
        n_products = math.ceil(SECONDS / timings[1])
    return 2 * m * k * n / min(timings[2:] or timings)
