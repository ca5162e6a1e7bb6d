"""Run everything, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter

import torch

from transformer_vq.doctor import attention, isolated, models, repeats, speed, syncs
from transformer_vq.doctor.environment import Environment, environment
from transformer_vq.doctor.findings import Check, Repeat, Syncs
from transformer_vq.doctor.samples import CPU_SIZES, GPU_SIZES, Sizes
from transformer_vq.doctor.speed import BATCHES, Plan, Speed
from transformer_vq.progress import progress_bar

Finding = Check | Repeat | Syncs
Task = Callable[[], Finding | list[Check | Repeat]]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found on a device."""

    environment: Environment
    checks: tuple[Check, ...]
    repeats: tuple[Repeat, ...]
    syncs: tuple[Syncs, ...]
    speeds: tuple[Speed, ...]
    """Empty if nothing was measured."""
    precision: str
    """Precision of the training steps and of the matrix products that were measured."""
    matmul_rate: float | None
    """FLOPs per second of the fastest matrix product."""
    quick: bool
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The paths that failed. A speed that could not be measured is not a failure."""
        found = [f"{x.path} ({x.dtype})" for x in self.checks if x.status == "FAILED"]
        found += [x.path for x in self.repeats if x.status == "FAILED"]
        return found + [x.what for x in self.syncs if x.failed]


def examine(device: torch.device, *, quick: bool = False, sizes: Sizes | None = None) -> Diagnosis:
    """Check and measure everything on a device; quick: without compiling and measuring."""
    start = perf_counter()
    if sizes is None:
        sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    known = environment(device)
    tasks = _tasks(sizes, device, quick)
    measured = speed.plan(device)
    n_speeds = 0 if quick else len(measured.cells) + len(BATCHES)
    found: list[Finding] = []
    with progress_bar("doctor", len(tasks) + n_speeds, "checks") as advance:
        for task in tasks:
            result = task()
            found += result if isinstance(result, list) else [result]
            advance(1, note=_name(found[-1]))
        rate, speeds = (None, []) if quick else _measure(measured, device, advance)
    return Diagnosis(
        known,
        tuple(x for x in found if isinstance(x, Check)),
        tuple(x for x in found if isinstance(x, Repeat)),
        tuple(x for x in found if isinstance(x, Syncs)),
        tuple(speeds),
        measured.precision,
        rate,
        quick,
        perf_counter() - start,
    )


def _tasks(sizes: Sizes, device: torch.device, quick: bool) -> list[Task]:
    """Return all checks. Those that could make the device unusable run in subprocesses."""
    tasks: list[Task] = []
    for precision in attention.precisions(device):
        solved = cache(partial(attention.solve, sizes, precision.dtype))
        tasks += attention.checks(solved, precision, device)
    if device.type != "cuda":
        tasks.append(lambda: Check("all paths", "tf32", "skipped", note=syncs.NEEDS_CUDA))
    tasks += models.checks(sizes, device)
    tasks += isolated.checks(sizes, device, quick)
    tasks += repeats.repeats(sizes, device)
    tasks += syncs.count_syncs(sizes, device)
    return tasks


def _measure(
    plan: Plan, device: torch.device, advance: Callable[..., None]
) -> tuple[float | None, list[Speed]]:
    """Return the rate of matrix products and all speeds."""
    rate = speed.matmul_rate(plan, device)
    advance(0, note="matrix products")
    rows = []
    for measure in (
        *(partial(speed.training_speed, cell, rate) for cell in plan.cells),
        *(partial(speed.decoding_speed, plan.decoder, n, device) for n in BATCHES),
    ):
        rows.append(measure())
        advance(1, note=f"{rows[-1].what}, {rows[-1].tokens:,} tokens")
    return rate, rows


def _name(finding: Finding) -> str:
    return finding.what if isinstance(finding, Syncs) else finding.path
