"""Check every implementation of the attention against Definition 3.1 in float64.

The reference is always computed on the CPU, so that it does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from transformer_vq.config import Reduction
from transformer_vq.doctor.findings import Check, Errors, check
from transformer_vq.doctor.samples import (
    Problem,
    Sizes,
    Tensors,
    definition,
    empty_state,
    linear_time,
    problems,
)
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.decode import DecodeState, Step, Token, attend_one_

TRITON = "triton"
Path = Callable[[Problem, Tensors], Tensor]


@dataclass(frozen=True)
class Precision:
    """A dtype and the precision of its matrix products."""

    name: str
    dtype: torch.dtype
    tolerance: float
    matmul: str = "highest"
    """As for torch.set_float32_matmul_precision."""


FP32 = Precision("fp32", torch.float32, 1e-5)
TF32 = Precision("tf32", torch.float32, 5e-3, matmul="high")
BF16 = Precision("bf16", torch.bfloat16, 2e-2)


@dataclass(frozen=True)
class Solved:
    """A problem, its exact output, and the exact gradients by the name of the input."""

    problem: Problem
    output: Tensor
    gradients: dict[str, Tensor]


def precisions(device: torch.device) -> list[Precision]:
    """Return the precisions to check: TF32 exists on CUDA devices only."""
    return [FP32, TF32, BF16] if device.type == "cuda" else [FP32, BF16]


@contextmanager
def matmul_rounding(precision: Precision) -> Iterator[None]:
    """Enable or disable TF32 in the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.matmul)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def solve(sizes: Sizes, dtype: torch.dtype) -> list[Solved]:
    """Return all problems with their exact results."""
    found = []
    for problem in problems(sizes, dtype):
        x = problem.tensors.to(torch.device("cpu"), torch.float64)
        output = definition(problem, x)
        gradients = torch.autograd.grad(output, list(x.leaves.values()), problem.probe)
        named = dict(zip(x.leaves, gradients, strict=True))
        found.append(Solved(problem, output.detach(), named))
    return found


def reductions() -> list[str]:
    """Return the reductions that run on every device, in this process."""
    return [name for name in get_args(Reduction) if name != TRITON]


def why_no_triton(device: torch.device) -> str:
    """Return why the Triton kernels cannot run; empty if they can."""
    return "" if device.type == "cuda" else "needs a GPU"


def checks(
    solved: Callable[[], list[Solved]], precision: Precision, device: torch.device
) -> Iterator[Callable[[], Check]]:
    """Yield a function per path that checks it. solved: called by the first one."""
    yield partial(check_path, "quadratic", definition, solved, precision, device)
    for reduction in reductions():
        path = partial(linear_time, reduction=reduction)
        yield partial(check_path, reduction, path, solved, precision, device)

    without_gradients = partial(decoded, solved)
    yield partial(check_path, "decode", token_by_token, without_gradients, precision, device)


def decoded(solved: Callable[[], list[Solved]]) -> list[Solved]:
    """Return the problems that are decoded token by token, without gradients."""
    return [replace(x, gradients={}) for x in solved() if x.problem.scenario == "carried state"]


def check_path(
    name: str,
    path: Path,
    solved: Callable[[], list[Solved]],
    precision: Precision,
    device: torch.device,
) -> Check:
    """Compare a path with the exact results."""
    return check(
        name,
        precision.name,
        precision.tolerance,
        lambda: compare(solved(), precision, device, path),
    )


def compare(solved: list[Solved], precision: Precision, device: torch.device, path: Path) -> Errors:
    """Return the errors of a path, of its output and of its gradients, for all problems."""
    errors: dict[str, float] = {}
    with matmul_rounding(precision):
        for case in solved:
            problem, name = case.problem, case.problem.name
            x = problem.tensors.to(device, precision.dtype)
            output = path(problem, x)
            errors[f"{name}, output"] = relative_error(output, case.output)
            if not case.gradients:
                continue
            probe = problem.probe.to(output.dtype).to(device)
            gradients = torch.autograd.grad(output, list(x.leaves.values()), probe)
            for (leaf, want), got in zip(case.gradients.items(), gradients, strict=True):
                errors[f"{name}, gradient of {leaf}"] = relative_error(got, want)
    return Errors(errors)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `want`, in float64 on the CPU."""
    got = got.detach().cpu().double()
    scale = want.square().mean().sqrt().clamp(min=1e-30)
    return float((got - want).square().mean().sqrt() / scale)


def token_by_token(
    problem: Problem, x: Tensors, attend: Callable[[Token, int, Step], Tensor] = attend_one_
) -> Tensor:
    """Prefill up to the cut, then decode in place; the gradient is not defined."""
    (cut,) = problem.cuts
    with torch.no_grad():
        first = x.tokens(slice(None), slice(0, cut))
        output, state = vq_attention(
            first.q,
            first.k_hat,
            first.z,
            first.v,
            first.codebook,
            first.by_distance,
            empty_state(problem, x),
        )
        decoding, outputs = DecodeState.of([state], [x.codebook]), [output]
        for t in range(cut, x.z.shape[-1]):
            q = x.q[..., t, :]
            token = Token(
                q @ x.codebook.mT,
                x.by_distance[..., t, :],
                x.z[..., t],
                x.v[..., t, :],
                q,
                x.k_hat[..., t, :],
            )
            output = attend(token, 0, Step.start_(decoding))
            outputs.append(output.unsqueeze(-2))
    return torch.cat(outputs, dim=-2)
