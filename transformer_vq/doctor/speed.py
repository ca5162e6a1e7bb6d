"""Measure training steps and decoding in bounded time, each in a subprocess.

The share of the matrix-product rate, measured in the same run, carries over between machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from transformer_vq.bench import decode
from transformer_vq.bench.cells import in_subprocess
from transformer_vq.bench.rates import matmul_rates
from transformer_vq.bench.records import KIND_NAMES
from transformer_vq.bench.steps import Cell, timed_steps
from transformer_vq.config import ModelConfig, Precision
from transformer_vq.doctor.findings import explain
from transformer_vq.memory_use import peak_bytes

STEP_SECONDS = 20.0  # after which no further training step is started
TIME_LIMIT = 120.0  # seconds per subprocess
CONTEXT = 512
BATCHES = (1, 8)


@dataclass(frozen=True)
class Plan:
    """What is measured on a kind of device."""

    cells: tuple[Cell, ...]
    """Training steps with VQ attention and with SDPA."""
    decoder: ModelConfig
    precision: Precision


@dataclass(frozen=True)
class Speed:
    """One measurement; numbers are None if it failed or does not have them."""

    what: str
    tokens: int
    """Length of a sequence, or of the context that is decoded after."""
    batch_size: int
    precision: str
    tokens_per_second: float | None = None
    peak_gb: float | None = None
    share: float | None = None
    """Share of the matrix-product rate; for decoding, of the read bandwidth."""
    failed: str = ""


def plan(device: torch.device) -> Plan:
    """Return measurements that take half a minute on two cores, or a few minutes on a GPU."""
    is_cpu = device.type == "cpu"
    precision: Precision = "fp32" if is_cpu else "bf16"
    base = Cell(
        head_type="shga",
        attention="vq",
        reduction="auto",
        seq_len=0,
        d_model=256 if is_cpu else 768,
        n_layer=1 if is_cpu else 4,
        precision=precision,
        device=str(device),
        steps=1 if is_cpu else 10,
    )
    lengths = (1024, 4096) if is_cpu else (2048, 8192, 32_768)
    cells = []
    for seq_len in lengths:  # the same number of tokens per step
        vq = replace(base, seq_len=seq_len, batch_size=lengths[-1] // seq_len)
        cells += [vq, replace(vq, head_type="mha", attention="sdpa")]
    width, n_layer = (256, 2) if is_cpu else (768, 8)
    return Plan(tuple(cells), ModelConfig(256, width, n_layer), precision)


def matmul_rate(plan: Plan, device: torch.device) -> float | None:
    """Return the FLOPs per second of the fastest matrix product; None if that fails."""
    found = _in_subprocess(matmul_rates, device, [plan.precision], 1)
    return None if isinstance(found, str) else found.get(plan.precision)


def training_speed(cell: Cell, rate: float | None) -> Speed:
    """Measure training steps; rate: of matrix products."""
    name = f"training, {cell.head_type}, {KIND_NAMES[cell.kind]}"
    row = Speed(name, cell.seq_len, cell.batch_size, cell.precision)
    found = _in_subprocess(timed_steps, cell, STEP_SECONDS)
    if isinstance(found, str):
        return replace(row, failed=found)
    seconds = found["seconds"]
    return replace(
        row,
        tokens_per_second=cell.batch_size * cell.seq_len / seconds,
        peak_gb=found["peak_gb"],
        share=None if rate is None else cell.flops / seconds / rate,
    )


def decoding_speed(config: ModelConfig, batch_size: int, device: torch.device) -> Speed:
    """Measure decoding in place after a short context; a step costs the same at every position."""
    row = Speed("decoding, shga", CONTEXT, batch_size, "fp32")
    found = _in_subprocess(timed_decoding, config, batch_size, device)
    if isinstance(found, str):
        return replace(row, failed=found)
    return replace(
        row,
        tokens_per_second=found["tokens_per_second"],
        peak_gb=found["peak_gb"],
        share=found["share_of_bandwidth"],
    )


def timed_decoding(config: ModelConfig, batch_size: int, device: torch.device) -> dict[str, float]:
    """Time decoding steps; run this in a subprocess to measure its peak memory."""
    with TemporaryDirectory() as folder:
        cell = decode.Cell("vq", CONTEXT, batch_size)
        timing = decode.measure(config, cell, device, Path(folder))
    return {**timing, "peak_gb": peak_bytes(device) / 1e9}  # type: ignore[dict-item]


def _in_subprocess(measure: Callable[..., Any], *arguments: object) -> dict[str, float] | str:
    """Return the result of a measurement, or why there is none."""
    try:
        found: dict[str, Any] = dict(in_subprocess(measure, *arguments, seconds=TIME_LIMIT))
    except Exception as error:
        return explain(error)[1]
    failed = found.get("failed")
    return found if failed is None else str(failed)
