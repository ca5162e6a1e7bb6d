"""tvq bench kernels: compile the Triton kernels for GPUs that need not be present."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.bench.kernel_records import KERNEL_DTYPES, TARGETS, KernelDtype, KernelTarget
from transformer_vq.cli.arguments import UsageError
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Json, Overwrite


@dataclass(frozen=True)
class Kernels:
    """Compile the Triton kernels at the paper's sizes: registers, shared memory and spills.

    Needs the extra `triton` but no GPU. Nothing is run or timed.
    """

    targets: tuple[KernelTarget, ...] = TARGETS
    """Architectures: sm_80 (A100), sm_90 (H100), gfx942 (MI300)."""
    dtypes: tuple[KernelDtype, ...] = KERNEL_DTYPES
    """Types of queries, keys and values."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Compile the kernels; print a table."""
    options = parse_with_output(Kernels, arguments, "kernels")
    for name, given in (("--targets", options.targets), ("--dtypes", options.dtypes)):
        if not given:
            raise UsageError(f"{name}: give at least one")

    from transformer_vq.bench import kernels

    record = kernels.run(options.targets, options.dtypes)
    print_result(record, kernels.table(record), options.out, options.json)
