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
    Solved,
    check_path,
    decoded,
    precisions,
    solve,
    token_by_token,
    why_no_triton,
)
from transformer_vq.doctor.findings import Check, Repeat, check
from transformer_vq.doctor.models import decoder, over_heads
from transformer_vq.doctor.repeats import repeat
from transformer_vq.doctor.samples import Problem, Sizes, Tensors, linear_time
from transformer_vq.ops.blockwise import vq_attention

Findings = list[Check | Repeat]
ATTENTION, DECODER = "compiled attention", "compiled decoder"
CPU_TIME_LIMIT, TIME_LIMIT = 120.0, 240.0  # seconds per subprocess
ONE_HEAD_TYPE: tuple[HeadType, ...] = ("gqa",)
"""Compiled on a CPU, where compiling takes long: it has key heads and groups of query heads."""


def checks(sizes: Sizes, device: torch.device, quick: bool) -> list[Callable[[], Findings]]:
    """Return a function per subprocess."""
    work = {ATTENTION: compiled_attention, DECODER: compiled_decoder}
    fewer = replace(sizes, head_types=ONE_HEAD_TYPE) if device.type == "cpu" else sizes
    found = [partial(_isolated, name, function, fewer, device) for name, function in work.items()]
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
    """Call `work` in a subprocess; return a row even if the process dies."""
    limit = CPU_TIME_LIMIT if device.type == "cpu" else TIME_LIMIT
    found = in_subprocess(work, sizes, device, seconds=limit)
    if isinstance(found, list):
        return found
    reason = found["failed"]
    return [Check(name, "all", "skipped" if "time limit" in reason else "FAILED", note=reason)]


def compiled_attention(sizes: Sizes, device: torch.device) -> Findings:
    """Check `vq_attention` of three blocks, compiled as in a compiled model."""
    sizes = replace(sizes, seq_len=3 * sizes.block_len)

    def path(problem: Problem, x: Tensors) -> Tensor:
        torch.compiler.reset()  # for the shapes of this problem, not for shapes in general
        compiled = torch.compile(vq_attention, fullgraph=True)
        output: Tensor = compiled(x.q, x.k_hat, x.z, x.v, x.codebook, x.by_distance)[0]
        return output

    found: Findings = []
    for precision in [FP32] if device.type == "cpu" else precisions(device):
        one_segment = partial(_one_segment, sizes, precision.dtype)
        found.append(check_path(ATTENTION, path, one_segment, precision, device))
    return found


def compiled_decoder(sizes: Sizes, device: torch.device) -> Findings:
    """Check the compiled decoding step."""
    compare = partial(decoder, compiled=True)
    measure = partial(over_heads, compare, sizes, device)
    return [check(DECODER, FP32.name, FP32.tolerance, measure)]


def triton(sizes: Sizes, device: torch.device) -> Findings:
    """Check the Triton kernels in all precisions, and repeat a training step with them."""
    from transformer_vq.ops.triton.decode import attend_one_

    path = partial(linear_time, reduction=TRITON)
    decode = partial(token_by_token, attend=attend_one_)
    found: Findings = []
    for precision in precisions(device):
        solved = partial(solve, sizes, precision.dtype)
        found.append(check_path(TRITON, path, solved, precision, device))
        without_gradients = partial(decoded, solved)
        found.append(check_path(f"decode, {TRITON}", decode, without_gradients, precision, device))
    return [*found, repeat(f"training step, {TRITON}", sizes, device, TRITON)]


def _one_segment(sizes: Sizes, dtype: torch.dtype) -> list[Solved]:
    return [x for x in solve(sizes, dtype) if x.problem.scenario == "one segment"]
