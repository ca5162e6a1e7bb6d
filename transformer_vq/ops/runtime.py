"""What all operations share: sizes per device, autocast, pytrees, checks of shapes and values.

The sizes for CPUs were chosen by measurement. Those for GPUs follow from counting kernels and
memory traffic; they have not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True)
class Execution:
    """How attention is executed; affects time and memory, and results by rounding only."""

    segment_scores: int
    """With reduction="auto", a layer processes a long input in segments of about this many scores.
    On CPUs, their activations then stay in caches and reused memory. On GPUs, large segments keep
    the number of kernels low; the limit bounds memory."""
    tile_queries: int | None
    """Queries that the fused implementation processes at a time; None for a whole block."""
    compile: bool
    """Whether training uses torch.compile by default. Compiled layers use the plain implementation
    with differentiable operations, which the compiler fuses; eager layers use the fused one."""


EXECUTIONS = {
    # Tiles of 256 queries: their scores stay in the caches of a core.
    "cpu": Execution(segment_scores=2**25, tile_queries=256, compile=False),
    # A segment has up to 1 GiB of float32 scores: 8,192 tokens of 16 sequences at S = L = 512.
    "cuda": Execution(segment_scores=2**28, tile_queries=None, compile=True),
}
"""By device type; PyTorch calls AMD GPUs cuda, too."""
OTHER = Execution(segment_scores=2**25, tile_queries=None, compile=False)
"""For all other device types."""


def execution_on(device: torch.device) -> Execution:
    """Return the default execution on a device."""
    return EXECUTIONS.get(device.type, OTHER)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


T = TypeVar("T")


def tensor_tree(kind: type[T]) -> type[T]:
    """Register a dataclass, so that states and FSDP find the tensors in it. A decorator."""
    _pytree.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Check that tensors have one axis per letter, and each letter the same size everywhere.

    check_shapes(q=(q, "bhgtk"), z=(z, "bht")) raises ValueError with both shapes.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in tensors.items():
        shape = tuple(tensor.shape)
        want = [sizes.get(letter, letter) for letter in letters]
        fits = len(shape) == len(letters) and all(
            size == sizes.setdefault(letter, size)
            for letter, size in zip(letters, shape, strict=True)
        )
        if not fits:
            axes = ", ".join(letters)
            wanted = ", ".join(map(str, want))
            raise ValueError(f"{name} has shape {shape}, want [{axes}] = [{wanted}]")


ASSERTING = {"cuda"}  # types of devices whose kernels can make a check


def is_readable(x: Tensor) -> bool:
    """Return whether reading values of x is free.

    Not on a GPU, where it would stall the host, nor while compiling, where it would break the
    graph.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_values(ok: Tensor, summary: str, error: Callable[[], Exception]) -> None:
    """Raise error() unless `ok` is True everywhere; on a CUDA device, check later.

    There a kernel makes the check when the GPU reaches it: it prints `summary`, and the next call
    that waits for the GPU fails. Compiled graphs and other devices do not check.
    """
    if is_readable(ok):
        if not ok.all():
            raise error()
    elif ok.device.type in ASSERTING and not torch.compiler.is_compiling():
        torch._assert_async(ok.all(), summary)
