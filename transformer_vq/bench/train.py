"""Tables 6-9 of the paper on any machine: training throughput by head type, kind and length.

The cells of a grid are measured in rounds, each cell in its own subprocess, and the best round
counts. So a slow minute of a shared machine does not distort a single cell. Ratios carry over
between machines: speed-ups, and the share of the machine's matrix-product rate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import cast, get_args

import torch

from transformer_vq.bench.cells import (
    OUT_OF_MEMORY,
    Interrupted,
    check_limits,
    in_subprocess,
    machine,
    over_time,
)
from transformer_vq.bench.defaults import REPEATS, Checkpointing
from transformer_vq.bench.rates import TIME_LIMIT, matmul_rates, precisions_to_measure
from transformer_vq.bench.records import (
    KIND_NAMES,
    Failure,
    StepKind,
    StepRecord,
    StepRow,
    StepTiming,
    row_kind,
)
from transformer_vq.bench.steps import Cell, timed_steps
from transformer_vq.config import HeadType
from transformer_vq.device import find_device, total_memory
from transformer_vq.progress import progress_bar, warn

USABLE_MEMORY = 0.9  # fraction of all memory, so that the machine stays responsive
START = 600.0  # seconds that a subprocess may take before its first step, including compilation


@dataclass
class Measured:
    """The measurements of a cell so far."""

    checkpoint_activations: bool
    timings: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    peak_gb: float = 0.0
    failed: str | None = None
    estimated_seconds: float | None = None

    def add(self, found: StepTiming | Failure) -> None:
        """Add the result of one round."""
        if "failed" not in found:
            self.timings.append(found["seconds"])
            self.first_step_seconds = found["first"]
            self.peak_gb = max(self.peak_gb, found["peak_gb"])
        elif not self.timings:  # a failure does not discard the timings of earlier rounds
            self.failed = found["failed"]


def run(
    cells: list[Cell],
    repeats: int = REPEATS,
    memory_gb: float | None = None,
    time_limit: float = 300.0,
    checkpointing: Checkpointing | None = None,
) -> StepRecord:
    """Measure all cells once per round.

    memory_gb: memory limit of a cell, by default nearly all memory. time_limit: seconds per step;
    a cell is skipped if a shorter sequence predicts that its steps take longer. A subprocess that
    far exceeds the time of its steps is killed. checkpointing: activation checkpointing; "auto"
    enables it in cells that are out of memory without it, None uses the setting of each cell.
    Raises Interrupted on Ctrl-C.
    """
    device = find_device(cells[0].device)
    if memory_gb is None:
        memory_gb = USABLE_MEMORY * total_memory(device) / 1e9
    check_limits(repeats=repeats, time_limit=time_limit, memory_gb=memory_gb)
    if checkpointing is not None:
        cells = [replace(cell, checkpoint_activations=checkpointing == "on") for cell in cells]
    measured = {cell: Measured(cell.checkpoint_activations) for cell in cells}

    def measure(cell: Cell, state: Measured) -> StepTiming | Failure:
        return in_subprocess(
            timed_steps,
            replace(cell, checkpoint_activations=state.checkpoint_activations),
            time_limit,
            memory_gb,
            memory_gb=memory_gb if device.type == "cpu" else None,
            seconds=_seconds_per_cell(time_limit),
        )

    with progress_bar("bench", 1 + repeats * len(cells), "cells") as advance:
        rates = _rates(device, cells)
        advance(1, note="matrix products")
        try:
            for cell, state in list(measured.items()) * repeats:
                if not state.timings and state.failed is None:
                    predict(cell, measured, time_limit)
                if state.failed is None:
                    found = measure(cell, state)
                    lacks_memory = not state.timings and found == Failure(failed=OUT_OF_MEMORY)
                    is_on = state.checkpoint_activations
                    if checkpointing == "auto" and lacks_memory and not is_on:
                        state.checkpoint_activations = True
                        found = measure(cell, state)
                    state.add(found)
                advance(1, note=_progress(cell, state))
        except KeyboardInterrupt:
            known = {cell: m for cell, m in measured.items() if m.timings or m.failed}
            raise Interrupted(_record(known, rates, device)) from None
    return _record(measured, rates, device)


def _rates(device: torch.device, cells: list[Cell]) -> dict[str, float]:
    """Return the matrix-product rates by precision; warn and return {} if that fails."""
    precisions = precisions_to_measure(device, [cell.precision for cell in cells])
    rates = in_subprocess(matmul_rates, device, precisions, seconds=TIME_LIMIT)
    if "failed" in rates:
        warn(f"the matrix-product rates were not measured: {rates['failed']}")
        return {}
    return rates


def _seconds_per_cell(time_limit: float) -> float:
    """Return the time limit of the subprocess of a cell: its start and three steps."""
    return START + 3 * time_limit


def _record(
    measured: dict[Cell, Measured], rates: dict[str, float], device: torch.device
) -> StepRecord:
    rows = [_row(cell, state, rates) for cell, state in measured.items()]
    _add_speedups(rows)
    return {
        "what": "training steps: forward, backward, optimizer, codebooks; gradients through the "
        "entire sequence",
        "machine": machine(device),
        "matmul_flops": rates,
        "rows": rows,
    }


def predict(cell: Cell, measured: dict[Cell, Measured], time_limit: float) -> None:
    """Use the results of shorter sequences of the same model.

    Marks the cell as failed if it would exceed the memory or `time_limit`, and enables activation
    checkpointing if a shorter sequence needed it.
    """
    limits = (OUT_OF_MEMORY, over_time(_seconds_per_cell(time_limit)))
    state = measured[cell]
    failed, estimate, checkpointing = None, None, state.checkpoint_activations
    for other, shorter in measured.items():  # short sequences first: the longest one decides
        same = replace(other, seq_len=cell.seq_len, steps=cell.steps)
        if (
            other.seq_len >= cell.seq_len
            or replace(same, checkpoint_activations=cell.checkpoint_activations) != cell
        ):
            continue
        if shorter.failed in limits and same == cell:
            state.failed = shorter.failed
            return
        if shorter.checkpoint_activations != other.checkpoint_activations:
            checkpointing = True
        known = min(shorter.timings, default=shorter.estimated_seconds)
        if known is not None:
            seconds = known * cell.flops / other.flops
            is_slow = seconds > time_limit
            failed = f"skipped, about {seconds:,.0f} s per step" if is_slow else None
            estimate = seconds if is_slow else None
    state.failed, state.estimated_seconds = failed, estimate
    state.checkpoint_activations = checkpointing


def _progress(cell: Cell, state: Measured) -> str:
    result = state.failed
    if state.timings:
        result = f"{cell.batch_size * cell.seq_len / state.timings[-1]:,.0f} tokens/s"
    return f"{cell.head_type} {cell.kind} {cell.seq_len:,} tokens: {result}"


def _row(cell: Cell, state: Measured, rates: dict[str, float]) -> StepRow:
    """Return the record of one cell."""
    row = cast(StepRow, asdict(cell))
    row["checkpoint_activations"] = state.checkpoint_activations
    if state.failed is not None:
        row["failed"] = state.failed
        if state.estimated_seconds is not None:
            row["estimated_seconds"] = state.estimated_seconds
        return row
    n_tokens = cell.batch_size * cell.seq_len
    best = min(state.timings)
    row["timings"] = state.timings
    row["peak_gb"] = state.peak_gb
    row["first_step_seconds"] = state.first_step_seconds
    row["seconds"] = best
    row["median_seconds"] = median(state.timings)
    row["tokens_per_second"] = n_tokens / best
    row["us_per_token"] = 1e6 * best / n_tokens
    row["flops_per_token"] = cell.flops_per_token
    row["share_of_rate"] = {name: cell.flops / best / rate for name, rate in rates.items()}
    return row


def _add_speedups(rows: list[StepRow]) -> None:
    """Add the speed-ups at equal length over full attention with the same heads, and over SDPA."""
    times = {
        (row["head_type"], row_kind(row), row["seq_len"]): row["seconds"]
        for row in rows
        if "failed" not in row
    }

    def speedup(row: StepRow, head_type: HeadType, kind: StepKind) -> float | None:
        seconds = times.get((head_type, kind, row["seq_len"]))
        return None if seconds is None else seconds / row["seconds"]

    for row in rows:
        if "failed" not in row:
            row["over_full"] = speedup(row, row["head_type"], "full")
            row["over_sdpa"] = speedup(row, "mha", "sdpa")


def table(record: StepRecord) -> str:
    """Return a Markdown table of all cells, after the model and the matrix-product rates."""
    rates = ", ".join(
        f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in record["matmul_flops"].items()
    )
    first = record["rows"][0]
    is_compiled = first["compile"]
    is_checkpointed = any(row["checkpoint_activations"] for row in record["rows"])
    lines = [
        f"Model: d_model {first['d_model']}, n_layer {first['n_layer']}, d_k {first['d_k']}, "
        f"{first['n_code']} codes, blocks of {first['block_len']}; batch {first['batch_size']}, "
        f"{first['precision']}{', compiled' if is_compiled else ''}"
        f"{'; *: activation checkpointing' if is_checkpointed else ''}",
        f"Best matrix-product rates: {rates or 'not measured'}",
        "",
        "| heads | attention | tokens | tokens/s | ms per step | median ms | peak GB "
        "| share of bf16 rate | share of fp32 rate | speed-up over full | speed-up over sdpa |"
        + " first step, s |"
        * is_compiled,
        "| --- | --- |" + " ---: |" * (9 + is_compiled),
    ]
    for row in sorted(record["rows"], key=lambda r: get_args(HeadType).index(r["head_type"])):
        mark = " *" if row["checkpoint_activations"] else ""
        start = f"| {row['head_type']} | {KIND_NAMES[row_kind(row)]}{mark} | {row['seq_len']:,} |"
        if "failed" in row:
            lines.append(f"{start} {row['failed']} |" + "  |" * (7 + is_compiled))
            continue
        share = row["share_of_rate"]
        cells = [
            f"{row['tokens_per_second']:,.0f}",
            f"{1e3 * row['seconds']:,.0f}",
            f"{1e3 * row['median_seconds']:,.0f}",
            f"{row['peak_gb']:.2f}",
            *(f"{share[name]:.2f}" if name in share else "" for name in ("bf16", "fp32")),
            *("" if x is None else f"{x:.2f}" for x in (row["over_full"], row["over_sdpa"])),
            *([f"{row['first_step_seconds']:,.0f}"] if is_compiled else []),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)
