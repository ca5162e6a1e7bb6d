"""Checks in subprocesses: torch.compile and Triton kernels.

Compiling takes long, and a broken kernel can crash the process or make the GPU unusable for it. A
subprocess has a time limit, and its end is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from transformer_vq.bench.cells import in_subprocess
from transformer_vq.config import HeadType
from transformer_vq.doctor.attention import (
    FP32,
    TRITON,
    check_path,
    precisions,
    solve,
    why_no_triton,
)
from transformer_vq.doctor.findings import Check, Repeat, check
from transformer_vq.doctor.models import decoder, over_heads
from transformer_vq.doctor.repeats import repeat
from transformer_vq.doctor.samples import ALL_HEADS, Problem, Sizes, Tensors, linear_time
from transformer_vq.ops.blockwise import vq_attention

Findings = list[Check | Repeat]
ATTENTION, DECODER = "compiled attention", "compiled decoder"
TIME_LIMIT = 180.0  # seconds per subprocess
ONE_HEAD_TYPE: tuple[HeadType, ...] = ("gqa",)
"""Compiled on a CPU, where compiling takes long: several key heads with several queries each."""


def checks(sizes: Sizes, device: torch.device, quick: bool) -> list[Callable[[], Findings]]:
    """Return a function per subprocess."""
    work = {ATTENTION: compiled_attention, DECODER: compiled_decoder}
    found = [partial(_isolated, name, function, sizes, device) for name, function in work.items()]
    if quick:
        found = [partial(_skipped, name, "--quick") for name in work]
    reason = why_no_triton(device)
    if reason:
        return [*found, partial(_skipped, TRITON, reason)]
    return [*found, partial(_isolated, TRITON, triton, sizes, device)]


def _skipped(name: str, reason: str) -> Findings:
    return [Check(name, "all", "skipped", note=reason)]


def _isolated(
    name: str,
    work: Callable[[Sizes, torch.device], Findings],
    sizes: Sizes,
    device: torch.device,
) -> Findings:
    """Call `work` in a subprocess; return a row also if the process dies."""
    found = in_subprocess(work, sizes, device, seconds=TIME_LIMIT)
    if isinstance(found, list):
        return found
    reason = found["failed"]
    return [Check(name, "all", "skipped" if "time limit" in reason else "FAILED", note=reason)]


def compiled_attention(sizes: Sizes, device: torch.device) -> Findings:
    """Check `vq_attention` of three blocks, compiled as in a compiled model."""
    sizes = replace(sizes, seq_len=3 * sizes.block_len)
    compiled = torch.compile(vq_attention, fullgraph=True)

    def path(problem: Problem, x: Tensors) -> Tensor:
        output: Tensor = compiled(x.q, x.k_hat, x.z, x.v, x.codebook, x.by_distance)[0]
        return output

    found: Findings = []
    for precision in [FP32] if device.type == "cpu" else precisions(device):
        solved = [
            x
            for x in solve(sizes, precision.dtype)
            if x.problem.scenario == "one segment" and x.problem.head_type in _head_types(device)
        ]
        found.append(check_path(ATTENTION, path, lambda s=solved: s, precision, device))  # type: ignore[misc]
    return found


def compiled_decoder(sizes: Sizes, device: torch.device) -> Findings:
    """Check the compiled decoding step."""
    compare = partial(decoder, compiled=True)
    measure = partial(over_heads, compare, sizes, device, head_types=_head_types(device))
    return [check(DECODER, FP32.name, FP32.tolerance, measure)]


def triton(sizes: Sizes, device: torch.device) -> Findings:
    """Check the Triton kernels in all precisions, and repeat a training step with them."""
    path = partial(linear_time, reduction=TRITON)
    found: Findings = [
        check_path(TRITON, path, partial(solve, sizes, precision.dtype), precision, device)
        for precision in precisions(device)
    ]
    return [*found, repeat(f"training step, {TRITON}", sizes, device, TRITON)]


def _head_types(device: torch.device) -> tuple[HeadType, ...]:
    return ONE_HEAD_TYPE if device.type == "cpu" else ALL_HEADS
