"""Tables 6-9 of the paper on any machine: training throughput by head type, kind and length.

Cells of a grid are measured in rounds, each cell in a fresh process; the best round counts, so that
a slow minute of a shared machine does not fall on one cell alone. The figures that travel are the
ratios: speed-ups, and the part of the machine's own matrix-product rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Literal, get_args

import torch

from transformer_vq.bench.cells import (
    OUT_OF_MEMORY,
    check_limits,
    in_subprocess,
    machine,
    over_time,
)
from transformer_vq.bench.rates import TIME_LIMIT, matmul_rates, precisions_to_measure
from transformer_vq.bench.steps import Cell, kind, timed_steps
from transformer_vq.config import HeadType
from transformer_vq.device import find_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.progress import progress_bar, warn

Kind = Literal["full", "sdpa", "serial", "matmul", "associative", "input_scan", "auto"]
Checkpointing = Literal["auto", "on", "off"]

KINDS: tuple[Kind, ...] = get_args(Kind)
HEAD_TYPES: tuple[HeadType, ...] = ("shga", "mqa", "mha")  # of the paper
LENGTHS = (2048, 8192, 32_768, 131_072)
QUICK_KINDS: tuple[Kind, ...] = ("full", "sdpa", "auto")
QUICK_LENGTHS = (2048, 8192)

USABLE_MEMORY = 0.9  # of all there is: rather a message than a dead machine
START = 600.0  # seconds that a child may take until its first step, compiling included


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a grid; `result` has the cells measured until then."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result


def grid(
    head_types: Sequence[HeadType],
    kinds: Sequence[Kind],
    lengths: Sequence[int],
    **shape: Any,
) -> list[Cell]:
    """All cells, short sequences first. The baseline `sdpa` has one head type, MHA.

    shape: other fields of a cell. Raises UserError for a model that cannot be.
    """
    if not lengths or not _series(head_types, kinds):
        raise UserError(
            "an empty grid: give at least one of each of --head-types, --kinds and --lengths"
        )
    if min(lengths) < 1:
        raise UserError(f"--lengths {min(lengths)}: must be at least 1")
    cells = []
    for seq_len in sorted(set(lengths)):
        for head_type, name in _series(head_types, kinds):
            cell = Cell(
                head_type,
                attention=name if name in ("full", "sdpa") else "vq",
                reduction="auto" if name in ("full", "sdpa") else name,  # type: ignore[arg-type]
                seq_len=seq_len,
                **shape,
            )
            cells.append(_with_steps(cell, max(lengths)))
    return cells


def _series(head_types: Sequence[HeadType], kinds: Sequence[Kind]) -> list[tuple[HeadType, Kind]]:
    by_head: list[tuple[HeadType, Kind]] = [
        (head_type, name) for head_type in head_types for name in kinds if name != "sdpa"
    ]
    return by_head + ([("mha", "sdpa")] if "sdpa" in kinds else [])


def _with_steps(cell: Cell, longest: int) -> Cell:
    """As many steps as take about the time of one linear step on the longest sequence."""
    linear = replace(cell, attention="vq", reduction="auto", seq_len=longest)
    return replace(cell, steps=max(1, round(linear.flops / cell.flops)))


def run(
    cells: list[Cell],
    repeats: int = 3,
    memory_gb: float | None = None,
    time_limit: float = 300.0,
    checkpointing: Checkpointing | None = None,
) -> dict[str, Any]:
    """Measure all cells once per round.

    memory_gb: what a cell may use, by default nearly all there is. time_limit: seconds that a step
    may take; a cell that would take longer, judging by a shorter sequence, is left out, and a
    subprocess that runs for much longer than its steps may take is ended.
    checkpointing: activation checkpointing; "auto" uses it where a cell would otherwise be out of
    memory, None as each cell says.
    """
    device = find_device(cells[0].device)
    if memory_gb is None:
        memory_gb = USABLE_MEMORY * total_memory(device) / 1e9
    check_limits(repeats=repeats, time_limit=time_limit, memory_gb=memory_gb)
    if checkpointing is not None:
        cells = [replace(cell, checkpoint_activations=checkpointing == "on") for cell in cells]
    rows = {cell: asdict(cell) | {"timings": [], "peak_gb": 0.0} for cell in cells}

    def measure(cell: Cell) -> dict[str, Any]:
        return in_subprocess(
            timed_steps,
            cell,
            time_limit,
            memory_gb,
            memory_gb=memory_gb if device.type == "cpu" else None,
            seconds=_seconds_per_cell(time_limit),
        )

    with progress_bar("bench", 1 + repeats * len(cells), "cells") as advance:
        precisions = precisions_to_measure(device, [cell.precision for cell in cells])
        rates = in_subprocess(matmul_rates, device, precisions, seconds=TIME_LIMIT)
        if "failed" in rates:
            warn(f"the matrix-product rates were not measured: {rates['failed']}")
            rates = {}
        advance(1, note="matrix products")
        try:
            for cell, row in list(rows.items()) * repeats:
                if not row["timings"] and "failed" not in row:
                    row |= foreseen(cell, rows, time_limit)
                if "failed" not in row:
                    found = measure(
                        replace(cell, checkpoint_activations=row["checkpoint_activations"])
                    )
                    lacks_memory = not row["timings"] and found.get("failed") == OUT_OF_MEMORY
                    is_on = row["checkpoint_activations"]
                    if checkpointing == "auto" and lacks_memory and not is_on:
                        row["checkpoint_activations"] = True
                        found = measure(replace(cell, checkpoint_activations=True))
                    _note(row, found)
                advance(1, note=_progress(cell, row))
        except KeyboardInterrupt:
            known = {cell: row for cell, row in rows.items() if row["timings"] or "failed" in row}
            raise Interrupted(_result(known, rates, device)) from None
    return _result(rows, rates, device)


def _seconds_per_cell(time_limit: float) -> float:
    """Return how long the subprocess of a cell may run: its start and three steps."""
    return START + 3 * time_limit


def _result(
    rows: dict[Cell, dict[str, Any]], rates: dict[str, float], device: torch.device
) -> dict[str, Any]:
    result = [_figures(cell, row, rates) for cell, row in rows.items()]
    _compare(result)
    return {
        "what": "training steps: forward, backward, optimizer, codebooks; gradients through the "
        "whole sequence",
        "machine": machine(device),
        "matmul_flops": rates,
        "rows": result,
    }


def foreseen(cell: Cell, rows: dict[Cell, dict[str, Any]], time_limit: float) -> dict[str, Any]:
    """What shorter sequences of the same model say: why a cell need not be tried, or that it has
    to checkpoint_activations as well; {} if nothing."""
    why: dict[str, Any] = {}
    again: dict[str, Any] = {}
    for other, row in rows.items():  # short ones first, so that the longest of them decides
        same = replace(other, seq_len=cell.seq_len, steps=cell.steps)
        if (
            other.seq_len >= cell.seq_len
            or replace(same, checkpoint_activations=cell.checkpoint_activations) != cell
        ):
            continue
        failed = row.get("failed")
        if failed in (OUT_OF_MEMORY, over_time(_seconds_per_cell(time_limit))) and same == cell:
            return {"failed": failed}
        if row["checkpoint_activations"] != other.checkpoint_activations:
            again = {"checkpoint_activations": True}
        known = min(row["timings"]) if row["timings"] else row.get("estimated_seconds")
        if known is not None:
            seconds = known * cell.flops / other.flops
            skipped = {"failed": f"skipped, about {seconds:,.0f} s per step"}
            why = skipped | {"estimated_seconds": seconds} if seconds > time_limit else {}
    return why | again


def _note(row: dict[str, Any], found: dict[str, Any]) -> None:
    if "failed" in found:
        row |= {} if row["timings"] else found  # it was measured in another round
    else:
        row["timings"].append(found["seconds"])
        row["first_step_seconds"] = found["first"]
        row["peak_gb"] = max(row["peak_gb"], found["peak_gb"])


def _progress(cell: Cell, row: dict[str, Any]) -> str:
    said = row.get("failed")
    if row["timings"]:
        said = f"{cell.batch_size * cell.seq_len / row['timings'][-1]:,.0f} tokens/s"
    return f"{cell.head_type} {kind(row)} {cell.seq_len:,} tokens: {said}"


def _figures(cell: Cell, row: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    """What follows from the timings of one cell."""
    if "failed" in row:
        return {key: value for key, value in row.items() if key not in ("timings", "peak_gb")}
    n_tokens = cell.batch_size * cell.seq_len
    best = min(row["timings"])
    return row | {
        "seconds": best,
        "median_seconds": median(row["timings"]),
        "tokens_per_second": n_tokens / best,
        "us_per_token": 1e6 * best / n_tokens,
        "flops_per_token": cell.flops_per_token,
        "share_of_rate": {name: cell.flops / best / rate for name, rate in rates.items()},
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """Speed-ups at equal length: over full attention of the same heads, over SDPA."""
    times = {
        (row["head_type"], kind(row), row["seq_len"]): row["seconds"]
        for row in rows
        if "failed" not in row
    }
    for row in rows:
        if "failed" not in row:
            bases = {"full": (row["head_type"], "full"), "sdpa": ("mha", "sdpa")}
            for name, base in bases.items():
                other = times.get((*base, row["seq_len"]))
                row[f"over_{name}"] = None if other is None else other / row["seconds"]


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all cells, and what they were measured against."""
    rates = ", ".join(
        f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in result["matmul_flops"].items()
    )
    first = result["rows"][0]
    is_compiled = first["compile"]
    again = any(row["checkpoint_activations"] for row in result["rows"])
    lines = [
        f"Model: d_model {first['d_model']}, {first['n_layer']} layers, d_k {first['d_k']}, "
        f"{first['n_code']} codes, blocks of {first['block_len']}; batch {first['batch_size']}, "
        f"{first['precision']}{', compiled' if is_compiled else ''}"
        f"{'; *: activations computed again in backward' if again else ''}",
        f"Best matrix-product rates here: {rates or 'not measured'}",
        "",
        "| heads | kind | tokens | tokens/s | ms per step | median | peak GB | of bf16 rate "
        "| of fp32 rate | over full | over sdpa |" + " first step, s |" * is_compiled,
        "| --- | --- |" + " ---: |" * (9 + is_compiled),
    ]
    for row in sorted(result["rows"], key=lambda r: get_args(HeadType).index(r["head_type"])):
        mark = " *" if row["checkpoint_activations"] else ""
        start = f"| {row['head_type']} | {kind(row)}{mark} | {row['seq_len']:,} |"
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
            *("" if row[key] is None else f"{row[key]:.2f}" for key in ("over_full", "over_sdpa")),
            *([f"{row['first_step_seconds']:,.0f}"] if is_compiled else []),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)
