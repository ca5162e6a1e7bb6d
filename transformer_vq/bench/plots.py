"""Figures of runs and recorded benchmarks; this module never measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_vq.bench.records import (
    AblationRecord,
    DecodeRecord,
    DecodeRow,
    ProfileRecord,
    RunsRecord,
    StepKind,
    StepRecord,
    StepRow,
    decode_name,
    row_kind,
)
from transformer_vq.config import HeadType
from transformer_vq.errors import UserError
from transformer_vq.files import read_json
from transformer_vq.training.plots import (
    plot_curves,
    plot_positions,
    plot_run,
    pyplot,
    save_figure,
)

STYLES: dict[HeadType, tuple[str, str]] = {
    "shga": ("o", "-"),
    "mqa": ("s", "--"),
    "mha": ("^", ":"),
    "gqa": ("D", "-."),
}
"""Marker and line style by head type."""


def plot_path(path: Path, out: Path | None = None) -> list[Path]:
    """Plot a run folder or a recorded benchmark; return the paths of the figures."""
    if path.is_file():
        out = out or path.with_suffix(".png")
        plot_record(_read(path), out)
        return [out]
    if not path.exists():
        raise UserError(f"{path} does not exist; give a run folder or a JSON file of measurements")
    return plot_run(path, out)


def plot_record(record: dict[str, Any], path: Path) -> None:
    """Write the figure of a benchmark record; its keys determine which figure it is."""
    draw = next(draw for key, draw in FIGURES.items() if key in record)
    try:
        draw(record, path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        # The file was edited, or another program wrote it.
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"the measurements are incomplete ({why}); repeat them") from error


def _read(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if not isinstance(record, dict) or not record.keys() & FIGURES.keys():
        raise UserError(f"{path} has no measurements; give a JSON file from benchmarks/")
    return record


def plot_runs(record: RunsRecord, path: Path) -> None:
    """Plot the learning curves of several runs."""
    plot_curves({name: run["curve"] for name, run in record["runs"].items()}, path)


def plot_decode(record: DecodeRecord, path: Path) -> None:
    """Plot tokens per second and state size by context length: a line per model and batch."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    lines: dict[tuple[str, int], list[DecodeRow]] = {}
    for row in record["decode"]:
        if "failed" not in row:
            lines.setdefault((decode_name(row), row["batch"]), []).append(row)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    for (name, batch), rows in lines.items():
        style = {
            "color": colors[name],
            "marker": "o" if batch == 1 else "s",
            "linestyle": "-" if batch == 1 else "--",
            "label": f"{name}, batch {batch}",
        }
        contexts = [row["context"] for row in rows]
        left.plot(contexts, [row["tokens_per_second"] for row in rows], **style)
        right.plot(contexts, [row["state_bytes"] / 1e6 for row in rows], **style)
    left.set_ylabel("tokens per second")
    right.set_ylabel("state size (MB)")
    for axes in (left, right):
        axes.set_xlabel("context length (tokens)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    save_figure(figure, path)


def plot_train(record: StepRecord, path: Path) -> None:
    """Plot tokens per second and peak memory by sequence length: a line per heads and kind."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    lines: dict[tuple[HeadType, StepKind], list[StepRow]] = {}
    for row in record["rows"]:
        if "failed" not in row:
            lines.setdefault((row["head_type"], row_kind(row)), []).append(row)
    kinds = list(dict.fromkeys(kind for _, kind in lines))
    for (head_type, kind), rows in lines.items():
        marker, line = STYLES[head_type]
        style = {
            "color": f"C{kinds.index(kind)}",
            "marker": marker,
            "ms": 4,
            "linestyle": line,
            "label": f"{head_type} {kind}",
        }
        checkpointed = [row for row in rows if row["checkpoint_activations"]]
        star = {"color": style["color"], "marker": "*", "ms": 12, "linestyle": ""}
        for shown, look in ((rows, style), (checkpointed, star)):
            lengths = [row["seq_len"] for row in shown]
            left.plot(lengths, [1e6 / row["us_per_token"] for row in shown], **look)
            right.plot(lengths, [row["peak_gb"] for row in shown], **look)
    has_stars = any(row["checkpoint_activations"] for rows in lines.values() for row in rows)
    left.set_ylabel("tokens per second")
    left.set_title("training" + " (star: activation checkpointing)" * has_stars)
    right.set_ylabel("peak memory (GB)")
    right.set_title("memory")
    ticks = sorted({row["seq_len"] for rows in lines.values() for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axes.set_xlabel("sequence length (tokens)")
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def plot_ablation(record: AblationRecord, path: Path) -> None:
    """Plot the validation loss of every seed with its mean, and the latency, by setting."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rows = record["ablation"]
    names = [f"{r['n_code']}" + ("" if r["compressive_cache"] else ",\nno cache") for r in rows]
    for x, row in enumerate(rows):
        bits = row["bits_per_byte"]
        left.plot([x] * len(bits), bits, "o", color="C0", ms=4, alpha=0.6)
        left.plot([x - 0.2, x + 0.2], [row["mean_bits_per_byte"]] * 2, color="C1", lw=2)
    right.bar(range(len(rows)), [row["latency"] for row in rows], color="C0")
    left.set_ylabel("validation bits per byte")
    left.set_title("seeds (dots) and mean (line)")
    right.set_ylabel(f"relative to {record['config']['model']['n_code']} codes")
    right.set_title("time of a training step")
    for axes in (left, right):
        axes.set_xticks(range(len(rows)), names)
        axes.set_xlabel("codebook size")
        axes.grid(alpha=0.3, axis="y")
    save_figure(figure, path)


def plot_profile(record: ProfileRecord, path: Path) -> None:
    """Plot the parts of a training step as bars."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    parts = record["profile"]
    total = record["profiled_seconds_per_step"]
    bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()])
    axes.bar_label(bars, [f"{seconds / total:.1%}" for seconds in parts.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"training step: {1e3 * total:,.0f} ms")
    axes.grid(alpha=0.3, axis="x")
    save_figure(figure, path)


FIGURES: dict[str, Callable[[Any, Path], None]] = {
    "runs": plot_runs,
    "decode": plot_decode,
    "ablation": plot_ablation,
    "profile": plot_profile,
    "rows": plot_train,
    "protocols": plot_positions,
}
"""The function that draws a record, by a key that only such records have."""
