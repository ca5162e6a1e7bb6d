"""Tables 6-9 of the paper on any machine: training throughput by head type, kind and length.

The cells of a grid are measured in rounds, each cell in its own subprocess, and the best round
counts. So a slow minute of a shared machine does not distort a single cell. Ratios carry over
between machines: speed-ups, and the share of the machine's matrix-product rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast, get_args

import torch

from common import (
    Interrupted,
    Output,
    Record,
    check_positive,
    label_end,
    log_lengths,
    log_values,
    main,
    new_figure,
)
from measure import (
    OUT_OF_MEMORY,
    TIME_LIMIT,
    Failure,
    in_subprocess,
    machine,
    matmul_rates,
    over_time,
    precisions_to_measure,
)
from steps import HEAD_TYPES, Cell, Shape, StepKind, shape_fields, step_kind, timed_steps
from transformer_vq.config import (
    HeadType,
)
from transformer_vq.device import find_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.plots import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    note,
)
from transformer_vq.progress import progress_bar, warn

KIND_NAMES: dict[StepKind, str] = {
    "full": "full attention",
    "auto": "Transformer-VQ",
    "serial": "Transformer-VQ, serial",
    "matmul": "Transformer-VQ, matmul",
    "associative": "Transformer-VQ, associative",
    "input_scan": "Transformer-VQ, input scan",
    "sdpa": "PyTorch SDPA",
}
"""Names in tables and figures, in the order of a legend."""

Checkpointing = Literal["auto", "on", "off"]

KINDS: tuple[StepKind, ...] = get_args(StepKind)

LENGTHS: tuple[int, ...] = (2048, 8192, 32_768, 131_072)

REPEATS = 3

QUICK_KINDS: tuple[StepKind, ...] = ("full", "sdpa", "auto")

QUICK_LENGTHS: tuple[int, ...] = (2048, 8192)

QUICK_REPEATS = 2


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

    def add(self, found: Record | Failure) -> None:
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
) -> Record:
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
    check_positive(repeats=repeats, time_limit=time_limit, memory_gb=memory_gb)
    if checkpointing is not None:
        cells = [replace(cell, checkpoint_activations=checkpointing == "on") for cell in cells]
    measured = {cell: Measured(cell.checkpoint_activations) for cell in cells}

    def measure(cell: Cell, state: Measured) -> Record | Failure:
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
) -> Record:
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


def _row(cell: Cell, state: Measured, rates: dict[str, float]) -> Record:
    """Return the record of one cell."""
    row = cast(Record, asdict(cell))
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


def _add_speedups(rows: list[Record]) -> None:
    """Add the speed-ups at equal length over full attention with the same heads, and over SDPA."""
    times = {
        (row["head_type"], row_kind(row), row["seq_len"]): row["seconds"]
        for row in rows
        if "failed" not in row
    }

    def speedup(row: Record, head_type: HeadType, kind: StepKind) -> float | None:
        seconds = times.get((head_type, kind, row["seq_len"]))
        return None if seconds is None else seconds / row["seconds"]

    for row in rows:
        if "failed" not in row:
            row["over_full"] = speedup(row, row["head_type"], "full")
            row["over_sdpa"] = speedup(row, "mha", "sdpa")


def table(record: Record) -> str:
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


def row_kind(row: Record) -> StepKind:
    """Return the kind of attention of a row."""
    return step_kind(row["attention"], row["reduction"])


def grid(
    head_types: Sequence[HeadType],
    kinds: Sequence[StepKind],
    lengths: Sequence[int],
    shape: Shape,
    compile: bool = False,
) -> list[Cell]:
    """Return all cells, short sequences first. The sdpa baseline has only one head type, MHA.

    Raises UserError for an invalid model.
    """
    if not lengths or not _series(head_types, kinds):
        raise UserError("the grid is empty; give at least one of --head-types, --kinds, --lengths")
    if min(lengths) < 1:
        raise UserError(f"--lengths {min(lengths)}: must be at least 1")
    fields = shape_fields(shape)
    cells = []
    for seq_len in sorted(set(lengths)):
        for head_type, kind in _series(head_types, kinds):
            if kind == "full" or kind == "sdpa":
                cell = Cell(head_type, kind, "auto", seq_len, compile=compile, **fields)
            else:
                cell = Cell(head_type, "vq", kind, seq_len, compile=compile, **fields)
            cells.append(_with_steps(cell, max(lengths)))
    return cells


def _series(
    head_types: Sequence[HeadType], kinds: Sequence[StepKind]
) -> list[tuple[HeadType, StepKind]]:
    by_head: list[tuple[HeadType, StepKind]] = [
        (head_type, kind) for head_type in head_types for kind in kinds if kind != "sdpa"
    ]
    return by_head + ([("mha", "sdpa")] if "sdpa" in kinds else [])


def _with_steps(cell: Cell, longest: int) -> Cell:
    """Give a cell as many steps as take about the time of one VQ step at the longest length."""
    linear = replace(cell, attention="vq", reduction="auto", seq_len=longest)
    return replace(cell, steps=max(1, round(linear.flops / cell.flops)))


COLORS: dict[StepKind, str] = {
    "full": VERMILION,
    "auto": BLUE,
    "serial": SKY,
    "matmul": PURPLE,
    "associative": ORANGE,
    "input_scan": MUTED,
    "sdpa": GREEN,
}


HEADS: dict[HeadType, tuple[str, str]] = {
    "shga": ("o", "-"),
    "mqa": ("s", "--"),
    "mha": ("^", ":"),
    "gqa": ("D", "-."),
}
"""Marker and line style by head type."""


MOST_LABELS = 4
"""A figure with more lines has a legend instead of labels at the line ends."""


LENGTH = "sequence length (tokens)"


def plot_train(record: Record, path: Path) -> None:
    """Plot time per token and peak memory by sequence length: a line per heads and kind."""
    lines = _lines(record)
    with new_figure(path, columns=2, height=3.6) as (figure, (left, right)):
        for line in lines:
            line.draw_time(left)
            line.draw_memory(right)
        left.margins(y=0.1)
        right.margins(y=0.1)
        _set_axes(record, left, "Time per token (microseconds)")
        _set_axes(record, right, "Peak memory (GB)")
        if len(lines) > MOST_LABELS:
            handles, labels = left.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3)
        note(figure, _explain(record))


def plot_time_per_token(record: Record, path: Path) -> None:
    """Plot time per token by sequence length, with the lengths that were skipped."""
    with new_figure(path, height=4.0) as (figure, (axes,)):
        for line in _lines(record):
            line.draw_time(axes, with_values=True)
        axes.margins(y=0.16)
        _set_axes(record, axes, "Time per token of a training step (microseconds)")
        note(figure, _explain(record))


class _Line:
    """The rows of one head type and kind, with the look of their line."""

    def __init__(self, rows: list[Record], label: str, is_labelled: bool, has_stars: bool) -> None:
        self.measured: list[Any] = [row for row in rows if "failed" not in row]
        self.failed = [row for row in rows if "failed" in row]
        self.label = label
        self.is_labelled = is_labelled
        self.has_stars = has_stars
        self.color = COLORS[row_kind(rows[0])]
        marker, line = HEADS[rows[0]["head_type"]]
        self.style = {"color": self.color, "marker": marker, "linestyle": line}

    def draw_time(self, axes: Any, with_values: bool = False) -> None:
        """Draw the measured times, and the estimates of skipped lengths as open markers."""
        lengths = [row["seq_len"] for row in self.measured]
        times = [row["us_per_token"] for row in self.measured]
        axes.plot(lengths, times, **self.style, label=self.label)
        self._draw_stars(axes, lengths, times)
        skipped = [row for row in self.failed if "estimated_seconds" in row]
        estimates = [1e6 * row["estimated_seconds"] / row["seq_len"] for row in skipped]
        ends = [row["seq_len"] for row in skipped], estimates
        if skipped:
            dotted = {"color": self.color, "linestyle": (0, (1, 2)), "lw": 1.6}
            axes.plot([*lengths[-1:], *ends[0]], [*times[-1:], *ends[1]], **dotted)
            axes.plot(*ends, "o", color=self.color, mfc="white", mew=1.6)
        if with_values:
            self._write_values(axes, lengths, times, skipped)
        everything = [*lengths, *ends[0]], [*times, *ends[1]]
        reason = "" if skipped else self._reason()
        if self.is_labelled and everything[0]:
            label_end(axes, everything, self.label + reason, self.color)

    def draw_memory(self, axes: Any) -> None:
        """Draw the measured memory; a cross marks the end of a line that stops early."""
        lengths = [row["seq_len"] for row in self.measured]
        memory = [row["peak_gb"] for row in self.measured]
        axes.plot(lengths, memory, **self.style)
        self._draw_stars(axes, lengths, memory)
        if self.failed and lengths:
            axes.plot(lengths[-1:], memory[-1:], "x", color=self.color, ms=10, mew=2)
        if self.is_labelled and lengths:
            label_end(axes, (lengths, memory), self.label + self._reason(), self.color)

    def _reason(self) -> str:
        """Return where and why the measurements stopped, for the label of the line."""
        if not self.failed:
            return ""
        first = self.failed[0]
        why = "skipped: too slow" if "estimated_seconds" in first else first["failed"]
        return f"\n{why}\nfrom {first['seq_len']:,}"

    def _draw_stars(self, axes: Any, lengths: list[int], values: list[float]) -> None:
        """Mark the steps with activation checkpointing if the figure has steps without it."""
        chosen = [i for i, row in enumerate(self.measured) if row["checkpoint_activations"]]
        if chosen and self.has_stars:
            line = [lengths[i] for i in chosen], [values[i] for i in chosen]
            axes.plot(*line, "*", color=self.color, ms=14)

    def _write_values(
        self, axes: Any, lengths: list[int], times: list[float], skipped: list[Record]
    ) -> None:
        """Write every measured time at its point, and the reason at skipped lengths."""
        style = {"textcoords": "offset points", "ha": "center", "color": self.color}
        offset = -19 if self.measured[0]["attention"] == "vq" else 9  # away from the other line
        for length, time in zip(lengths, times, strict=True):
            axes.annotate(f"{time:,.0f}", (length, time), xytext=(0, offset), **style)
        for row in skipped:
            point = row["seq_len"], 1e6 * row["estimated_seconds"] / row["seq_len"]
            text = f"skipped: about\n{row['estimated_seconds']:,.0f} s per step"
            axes.annotate(text, point, xytext=(-10, 6), **{**style, "ha": "right"}, fontsize=9.5)


def _lines(record: Record) -> list[_Line]:
    groups: dict[tuple[HeadType, StepKind], list[Record]] = {}
    for row in record["rows"]:
        groups.setdefault((row["head_type"], row_kind(row)), []).append(row)
    has_many_heads = len({head_type for head_type, _ in groups}) > 1
    is_labelled = len(groups) <= MOST_LABELS
    has_stars = not _all_checkpointed(record)
    lines = []
    order = list(KIND_NAMES)
    for (head_type, kind), rows in sorted(groups.items(), key=lambda x: order.index(x[0][1])):
        heads = f", {head_type.upper()}" if has_many_heads else ""
        lines.append(_Line(rows, KIND_NAMES[kind] + heads, is_labelled, has_stars))
    return lines


def _set_axes(record: Record, axes: Any, title: str) -> None:
    axes.set_title(title)
    log_lengths(axes, sorted({row["seq_len"] for row in record["rows"]}), LENGTH)
    log_values(axes)


def _explain(record: Record) -> str:
    """Return the note below the figure."""
    notes = []
    if any("estimated_seconds" in row for row in record["rows"]):
        notes.append("Open circles: estimated from the FLOPs, not run.")
    measured = [row for row in record["rows"] if "failed" not in row]
    if _all_checkpointed(record):
        notes.append("All steps use activation checkpointing.")
    elif any(row["checkpoint_activations"] for row in measured):
        notes.append("Star: activation checkpointing.")
    return " ".join(notes)


def _all_checkpointed(record: Record) -> bool:
    """Return whether every measured step uses activation checkpointing."""
    return all(row["checkpoint_activations"] for row in record["rows"] if "failed" not in row)


@dataclass(frozen=True, kw_only=True)
class Options(Shape, Output):
    """Measure training throughput and memory by head type, kind of attention and length.

    Reproduces Tables 6-9. Every cell of the grid runs in a subprocess and times complete training
    steps: forward, backward through the entire sequence, optimizer, codebooks. All cells are
    measured once per round. Ctrl-C prints the results so far.
    """

    head_types: tuple[HeadType, ...] = HEAD_TYPES
    """Head types: single-head gated, multi-query, multi-head and grouped-query attention."""
    kinds: tuple[StepKind, ...] | None = None
    """full: quadratic attention as in the paper; sdpa: MHA with PyTorch's fused attention; the
    others: VQ attention with that reduction. By default all except triton, which needs a GPU."""
    lengths: tuple[int, ...] | None = None
    """Tokens per sequence; by default 2048 8192 32768 131072."""
    checkpoint_activations: Checkpointing = "auto"
    """Activation checkpointing; auto enables it in cells that are out of memory without it."""
    compile: bool = False
    """Use torch.compile."""
    repeats: int | None = None
    """Rounds; the best and the median of each cell are reported. By default 3."""
    quick: bool = False
    """Measure only full, sdpa and auto at 2048 and 8192 tokens in 2 rounds: a few minutes on two
    cores. --kinds, --lengths and --repeats take precedence."""
    memory_gb: float | None = None
    """Memory limit of a cell; by default nearly all memory."""
    time_limit: float = 300.0
    """Seconds per step; cells that would take longer are skipped, with an estimate. A cell that
    takes longer than 600 seconds and three such steps is stopped."""


def measure(options: Options) -> Record:
    """Measure the grid that the options describe."""
    kinds, lengths, repeats = KINDS, LENGTHS, REPEATS
    if options.quick:
        kinds, lengths, repeats = QUICK_KINDS, QUICK_LENGTHS, QUICK_REPEATS
    cells = grid(
        options.head_types,
        kinds if options.kinds is None else options.kinds,
        lengths if options.lengths is None else options.lengths,
        options,
        options.compile,
    )
    repeats = repeats if options.repeats is None else options.repeats
    limits = (options.memory_gb, options.time_limit)
    return run(cells, repeats, *limits, options.checkpoint_activations)


if __name__ == "__main__":
    main(Options, measure, table, plot_train)
