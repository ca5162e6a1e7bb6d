"""Record of `tvq bench kernels`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

KernelTarget = Literal["sm_80", "sm_90", "gfx942"]
KernelDtype = Literal["bf16", "fp32"]
TARGETS: tuple[KernelTarget, ...] = ("sm_80", "sm_90", "gfx942")
KERNEL_DTYPES: tuple[KernelDtype, ...] = ("bf16", "fp32")


class KernelRow(TypedDict):
    """Resources of one kernel, compiled for one target."""

    kernel: str
    target: str
    layers: list[str]
    """Layers and types of numbers that launch exactly this kernel."""
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    """Bytes per thread that the compiler moves to memory."""
    spilled_scalars: int
    """Scalar registers that move to vector registers, on AMD only."""


class KernelRecord(TypedDict):
    """All kernels for all targets; `triton` is the version of the compiler."""

    triton: str
    kernels: list[KernelRow]
