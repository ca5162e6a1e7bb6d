"""How attention is executed on each device: sizes and implementations that never change a result.

The values for CPUs were chosen by measurement. Those for GPUs follow from counting kernels and
memory traffic; they have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

    def __post_init__(self) -> None:
        for name in ("segment_scores", "tile_queries"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


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
