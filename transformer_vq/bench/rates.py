"""How fast this machine multiplies matrices: what the speed of a model is measured against."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from transformer_vq.bench.cells import synchronize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (m, k, n): squares, and tokens by widths as a model has them
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 768, 3072))
ACCELERATOR_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (32_768, 2048, 8192))
SECONDS = 0.1  # that one timing lasts at least


def matmul_rates(device: torch.device, repeats: int = 3) -> dict[str, Any]:
    """FLOPs per second of the best shape, for each precision."""
    shapes = SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES
    return {
        name: max(_rate(device, dtype, *shape, repeats) for shape in shapes)
        for name, dtype in DTYPES.items()
    }


def _rate(device: torch.device, dtype: torch.dtype, m: int, k: int, n: int, repeats: int) -> float:
    """The best of several timings."""
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)

    def seconds(times: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b)
        synchronize(device)
        return (time.perf_counter() - start) / times

    seconds(1)  # warm-up
    times = math.ceil(SECONDS / seconds(1))
    return 2 * m * k * n / min(seconds(times) for _ in range(repeats))
