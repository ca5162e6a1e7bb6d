"""Launch kernels.

Every launch goes through `run`. So the ahead-of-time compilation of `benchmarks/kernels.py` and the
checks of the tests, which replace it, see exactly what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile, and the compiler's options for it."""

    rows: int
    columns: int
    values: int = 64  # columns of the values in a tile, for kernels that read values
    warps: int = 4
    stages: int = 1


# Kernel -> tiles for two and for four bytes per number: the largest that compile without spills at
# the paper's sizes (benchmarks/triton-kernels.json). Smaller inputs take smaller tiles.
TILES: dict[str, tuple[Tiles, Tiles]] = {
    "nearest_code": (Tiles(32, 32), Tiles(32, 32)),
    "cache_prefix": (Tiles(64, 64, warps=8), Tiles(32, 32)),
    "cache_suffix": (Tiles(32, 0), Tiles(32, 0)),
    "evicted_gradient": (Tiles(32, 0), Tiles(32, 0)),
    "block_lse": (Tiles(64, 32), Tiles(16, 16)),
    "block_weights": (Tiles(64, 64), Tiles(32, 32)),
    "softmax_backward": (Tiles(16, 256), Tiles(16, 128)),
    "flash_blocks": (Tiles(64, 32, warps=8), Tiles(16, 16)),
    "decode_token": (Tiles(2**16, 16, 128), Tiles(2**16, 16, 128)),  # rows: all query heads
}


@dataclass(frozen=True)
class Launch:
    """One call of a kernel. arguments: tensors and integers, constants: known when compiling."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, Any]
    options: Mapping[str, int]


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], tiles: Tiles, **values: Any) -> None:
    """Run a kernel on the device of its tensors.

    values: what it needs, by name, and possibly more; constants are in capitals.
    """
    values |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "VALUES": tiles.values}
    constants = {name: values[name] for name in kernel.arg_names if name.isupper()}
    arguments = {name: values[name] for name in kernel.arg_names if not name.isupper()}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    run(Launch(kernel, grid, arguments, constants, options))


def run(call: Launch) -> None:
    """Run a launch; may be replaced by a function that wraps or collects launches."""
    tensor = next(x for x in call.arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device_of(tensor):
        call.kernel[call.grid](**call.arguments, **call.constants, **call.options)


def tiles_of(
    name: str, dtype: torch.dtype, *, rows: int, columns: int = 1, values: int = 1
) -> Tiles:
    """Return the tiles of a kernel for an input of this size."""
    most = TILES[name][dtype.itemsize > 2]
    sizes = fit(rows, most.rows), fit(columns, most.columns), fit(values, most.values)
    return Tiles(*sizes, most.warps, most.stages)


def fit(size: int, most: int) -> int:
    """Return the size of a tile: a power of two from 16 to `most`, no larger than needed."""
    return max(16, min(most, int(triton.next_power_of_2(size))))


def n_tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def dot_constants(dtype: torch.dtype, *, exact: bool = False) -> dict[str, Any]:
    """Return the constants of `dot`. exact: full float32 even if TF32 is allowed."""
    tf32 = torch.get_float32_matmul_precision() != "highest" and torch.version.hip is None
    # The interpreter multiplies the bit patterns of bfloat16; widening is exact.
    return {
        "PRECISION": "tf32" if tf32 and not exact else "ieee",
        "WIDEN": is_interpreted() and dtype != torch.float32,
    }
