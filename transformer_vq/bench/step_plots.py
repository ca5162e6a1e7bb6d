"""Figures of training steps: time per token and peak memory by sequence length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_vq.bench.records import StepKind, StepRecord, StepRow, row_kind
from transformer_vq.config import HeadType
from transformer_vq.training.plot_style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    label_end,
    log_lengths,
    log_values,
    new_figure,
    note,
)

KINDS: dict[StepKind, tuple[str, str]] = {
    "full": ("full attention", VERMILION),
    "auto": ("Transformer-VQ", BLUE),
    "serial": ("Transformer-VQ, serial", SKY),
    "matmul": ("Transformer-VQ, matmul", PURPLE),
    "associative": ("Transformer-VQ, associative", ORANGE),
    "input_scan": ("Transformer-VQ, input scan", MUTED),
    "triton": ("Transformer-VQ, Triton kernels", MUTED),
    "sdpa": ("PyTorch SDPA", GREEN),
}
"""Name and colour by kind of attention, in the order of the legend."""
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


def plot_train(record: StepRecord, path: Path) -> None:
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


def plot_time_per_token(record: StepRecord, path: Path) -> None:
    """Plot time per token by sequence length, with the lengths that were skipped."""
    with new_figure(path, height=4.0) as (figure, (axes,)):
        for line in _lines(record):
            line.draw_time(axes, with_values=True)
        axes.margins(y=0.16)
        _set_axes(record, axes, "Time per token of a training step (microseconds)")
        note(figure, _explain(record))


class _Line:
    """The rows of one head type and kind, with the look of their line."""

    def __init__(self, rows: list[StepRow], label: str, is_labelled: bool, has_stars: bool) -> None:
        self.measured: list[Any] = [row for row in rows if "failed" not in row]
        self.failed = [row for row in rows if "failed" in row]
        self.label = label
        self.is_labelled = is_labelled
        self.has_stars = has_stars
        self.color = KINDS[row_kind(rows[0])][1]
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
        self, axes: Any, lengths: list[int], times: list[float], skipped: list[StepRow]
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


def _lines(record: StepRecord) -> list[_Line]:
    groups: dict[tuple[HeadType, StepKind], list[StepRow]] = {}
    for row in record["rows"]:
        groups.setdefault((row["head_type"], row_kind(row)), []).append(row)
    has_many_heads = len({head_type for head_type, _ in groups}) > 1
    is_labelled = len(groups) <= MOST_LABELS
    has_stars = not _all_checkpointed(record)
    lines = []
    order = list(KINDS)
    for (head_type, kind), rows in sorted(groups.items(), key=lambda x: order.index(x[0][1])):
        heads = f", {head_type.upper()}" if has_many_heads else ""
        lines.append(_Line(rows, KINDS[kind][0] + heads, is_labelled, has_stars))
    return lines


def _set_axes(record: StepRecord, axes: Any, title: str) -> None:
    axes.set_title(title)
    log_lengths(axes, sorted({row["seq_len"] for row in record["rows"]}), LENGTH)
    log_values(axes)


def _explain(record: StepRecord) -> str:
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


def _all_checkpointed(record: StepRecord) -> bool:
    """Return whether every measured step uses activation checkpointing."""
    return all(row["checkpoint_activations"] for row in record["rows"] if "failed" not in row)
