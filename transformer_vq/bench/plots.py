"""Figures of runs and recorded benchmarks; this module never measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformer_vq.bench.compress_plot import plot_compression
from transformer_vq.bench.decode_records import DecodeKind, DecodeRecord, DecodeRow
from transformer_vq.bench.first_token_plot import plot_first_token
from transformer_vq.bench.recall_plot import plot_recall
from transformer_vq.bench.records import (
    AblationRecord,
    ProfileRecord,
    RunsRecord,
)
from transformer_vq.bench.step_plots import plot_train
from transformer_vq.bench.trial_plots import plot_scaling, plot_variants
from transformer_vq.errors import UserError
from transformer_vq.files import read_json
from transformer_vq.training.plot_style import (
    BLUE,
    GREEN,
    MUTED,
    VERMILION,
    label_end,
    log_lengths,
    log_values,
    new_figure,
    note,
)
from transformer_vq.training.plots import plot_curves, plot_positions, plot_run

DECODE_NAMES: dict[DecodeKind, tuple[str, str]] = {
    "vq": ("Transformer-VQ", BLUE),
    "full": ("full attention", VERMILION),
    "gpt2": ("GPT-2", GREEN),
}
"""Name and color of a decoding benchmark."""
DecodeKey = Literal["tokens_per_second", "state_bytes"]
RUN_NAMES = {"vq": "Transformer-VQ", "full": "full attention"}


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
    """Plot the learning curves of several runs, named by their attention if it differs."""
    runs = record["runs"]
    kinds = {name: run["config"]["model"]["attention"] for name, run in runs.items()}
    if len(set(kinds.values())) == len(kinds):
        kinds = {name: RUN_NAMES.get(kind, kind) for name, kind in kinds.items()}
    else:
        kinds = {name: name for name in kinds}
    plot_curves({kinds[name]: run["curve"] for name, run in runs.items()}, path)


def plot_decode(record: DecodeRecord, path: Path, batches: list[int] | None = None) -> None:
    """Plot tokens per second and state size by context length: a row of panels per batch size.

    batches: batch sizes to show; None shows all.
    """
    shown = [row for row in record["decode"] if batches is None or row["batch"] in batches]
    sizes = sorted({row["batch"] for row in shown})
    contexts = sorted({row["context"] for row in shown})
    with new_figure(path, rows=len(sizes), columns=2, height=3.2) as (figure, axes):
        for number, batch in enumerate(sizes):
            left, right = axes[2 * number : 2 * number + 2]
            lines: dict[tuple[DecodeKind, bool], list[DecodeRow]] = {}
            for row in shown:
                if row["batch"] == batch:
                    lines.setdefault((row["kind"], row["compiled"]), []).append(row)
            for (kind, compiled), rows in lines.items():
                _draw_decode(left, rows, "tokens_per_second")
                if not compiled or (kind, False) not in lines:  # compiling does not change it
                    _draw_decode(right, rows, "state_bytes")
            which = f", batch {batch}" if len(sizes) > 1 else ""
            left.set_title(f"Tokens per second{which}")
            right.set_title(f"State size in MB{which}")
            for panel in (left, right):
                log_lengths(panel, contexts, "context length (tokens)")
                panel.margins(y=0.12)
                log_values(panel)
        failed = "Crosses: the last context that could be measured. "
        gpt2 = "GPT-2: Hugging Face model with about as many parameters."
        has_failed = any("failed" in row for row in shown)
        note(figure, failed * has_failed + gpt2 * any(row["kind"] == "gpt2" for row in shown))


def _draw_decode(axes: Any, rows: list[DecodeRow], key: DecodeKey) -> None:
    """Draw one line; a cross marks its end if a longer context failed."""
    measured = [row for row in rows if "failed" not in row]
    if not measured:
        return
    name, color = DECODE_NAMES[rows[0]["kind"]]
    style = {"linestyle": "--", "marker": "s"} if rows[0]["compiled"] else {"marker": "o"}
    unit = 1e6 if key == "state_bytes" else 1
    line = [row["context"] for row in measured], [row[key] / unit for row in measured]
    axes.plot(*line, color=color, **style)
    if rows[0]["compiled"]:
        name += ",\ncompiled"
    failed = next((row for row in rows if "failed" in row), None)
    if failed is None:
        label_end(axes, line, name, color)
        return
    end = line[0][-1], line[1][-1]
    axes.plot(*end, "x", color=color, ms=10, mew=2)
    if key == "state_bytes":  # lines rise, so the space is above
        style = {"ha": "right", "va": "bottom", "color": color, "textcoords": "offset points"}
        axes.annotate(name.replace(" ", "\n"), end, xytext=(5, 8), **style)
    else:
        reason = f"\n{failed['failed']}\nat {failed['context']:,}"
        label_end(axes, line, name + reason, color)


def plot_ablation(record: AblationRecord, path: Path) -> None:
    """Plot the validation loss of every seed with its mean, and the latency, by setting."""
    rows = record["ablation"]
    names = [f"{r['n_code']}\n" + ("" if r["compressive_cache"] else "no cache") for r in rows]
    with new_figure(path, columns=2) as (figure, (left, right)):
        for x, row in enumerate(rows):
            bits, mean = row["bits_per_byte"], row["mean_bits_per_byte"]
            left.plot([x] * len(bits), bits, "o", color=BLUE, ms=6, alpha=0.55, mew=0)
            left.plot([x - 0.22, x + 0.22], [mean] * 2, color=VERMILION)
        bars = right.bar(range(len(rows)), [row["latency"] for row in rows], 0.6, color=BLUE)
        right.bar_label(bars, [f"{row['latency']:.2f}x" for row in rows], padding=3, color=MUTED)
        left.set_title("Validation loss (bits per byte)")
        right.set_title(f"Step time relative to {record['config']['model']['n_code']} codes")
        right.margins(y=0.12)
        for axes in (left, right):
            axes.set_xticks(range(len(rows)), names)
            axes.set_xlabel("codebook size")
            axes.grid(visible=False, axis="x")
        note(
            figure, "Left: a dot per seed, a line for the mean. The loss axis does not start at 0."
        )


def plot_profile(record: ProfileRecord, path: Path) -> None:
    """Plot the parts of a training step as bars."""
    parts = record["profile"]
    total = record["profiled_seconds_per_step"]
    with new_figure(path, height=3.0) as (_, (axes,)):
        bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()], 0.65)
        shares = [f"{seconds / total:.1%}" for seconds in parts.values()]
        axes.bar_label(bars, shares, padding=4, color=MUTED)
        for bar in bars:
            bar.set_color(BLUE)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("milliseconds")
        axes.set_title(f"Parts of a training step of {1e3 * total:,.0f} ms")
        axes.grid(visible=False, axis="y")


FIGURES: dict[str, Callable[[Any, Path], None]] = {
    "runs": plot_runs,
    "decode": plot_decode,
    "ablation": plot_ablation,
    "variants": plot_variants,
    "scaling": plot_scaling,
    "recall": plot_recall,
    "profile": plot_profile,
    "compression": plot_compression,
    "first_token": plot_first_token,
    "rows": plot_train,
    "protocols": plot_positions,
}
"""The function that draws a record, by a key that only such records have."""
