"""Figures of training runs: learning curves and loss by position. Needs matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer_vq.errors import UserError, import_extra
from transformer_vq.files import CorruptFileError, atomic_write, read_object
from transformer_vq.progress import short
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run_list import checkpoint_label

INK, MUTED, LINE, GRID = "#1f2328", "#57606a", "#8c959f", "#e4e8ec"
# Colors that remain distinguishable with color blindness, in the order of their use.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3f9bd1", "#3b4048", "#e0709a")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, ROSE = COLORS

WIDTH = 8.0  # width of every figure in inches: 1,200 pixels, readable if shown 700 pixels wide
DPI = 150
STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 2,
    "lines.markersize": 4,
    "legend.frameon": False,
}

MIN_TOKENS = 100  # fewest tokens for which the mean loss of a position is drawn
Rows = list[dict[str, Any]]
"""Rows of metrics.jsonl."""
XAxis = Literal["step", "tokens", "time"]
X_LABELS = {"step": "training step", "tokens": "tokens", "time": "hours"}
HEALTH = {"share_in_use": ("codes in use", "-"), "relative_error": ("quantization error", "--")}
"""Name and line style of the codebook metrics."""


def plot_run(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write the figures of a run folder and return their paths.

    The learning curves are written to `out` (default: RUN/curves.png). Each RUN/evaluation-*.json
    gets a figure of its loss by position next to it. Raises UserError if the folder has no metrics.
    """
    run = Path(run)
    curves = run / "curves.png" if out is None else Path(out)
    plot_curves({run.name: _read_rows(run)}, curves)
    written = [curves]
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            plot_positions(read_object(path), path.with_suffix(".png"))
        except (CorruptFileError, LookupError, TypeError, ValueError, AttributeError) as error:
            fix = f"write it again with `tvq eval {run}`"
            raise UserError(f"{path} is not an evaluation; {fix}") from error
        written.append(path.with_suffix(".png"))
    return written


def _read_rows(run: Path) -> Rows:
    rows = read_metrics(run)
    if not any(row["kind"] == "train" for row in rows):
        raise UserError(f"{run} has no metrics to plot; give a run folder with a metrics.jsonl")
    return rows


def plot_curves(runs: dict[str, Rows], path: Path) -> None:
    """Plot the loss and the codebook health of several runs.

    runs: rows of metrics.jsonl by the name of the run.
    """
    with new_figure(path, columns=2) as (figure, (left, right)):
        _draw_losses(figure, left, runs, "step")
        for (name, rows), color in zip(runs.items(), cycle(COLORS), strict=False):
            health = [row for row in rows if row["kind"] == "train" and "share_in_use" in row]
            for key, (label, style) in HEALTH.items() if health else ():
                label = f"{name}: {label}" if len(runs) > 1 else label
                steps, values = [row["step"] for row in health], [row[key] for row in health]
                right.plot(steps, smooth(values), style, color=color, label=label)
        right.set_title("Codebooks, mean over layers")
        right.set_xlabel(X_LABELS["step"])
        right.set_ylim(0, 1.03)
        if right.lines:
            right.legend()
        else:
            right.set_axis_off()
            right.text(0.5, 0.5, "Full attention has no codebooks.", ha="center", color=MUTED)


def compare_runs(paths: Sequence[Path], out: Path, x: XAxis = "step") -> None:
    """Plot the training and validation loss of several run folders in one figure.

    x: see `positions`. Raises UserError if a folder has no metrics.
    """
    absolute = [path.absolute() for path in paths]
    if len(set(absolute)) < len(absolute):
        raise UserError("a run is given twice; give every run once")
    names = [path.name for path in absolute]
    shown = [str(x) if names.count(x.name) > 1 else x.name for x in absolute]
    runs = dict(zip(shown, map(_read_rows, absolute), strict=True))
    with new_figure(out, height=4.2) as (figure, (axes,)):
        _draw_losses(figure, axes, runs, x)


def _draw_losses(figure: Any, axes: Any, runs: dict[str, Rows], x: XAxis) -> None:
    """Draw the training and the validation loss of each run."""
    unit = 3600.0 if x == "time" else 1.0
    late: list[float] = []
    for (run, rows), color in zip(runs.items(), cycle(COLORS), strict=False):
        places = zip(positions(rows, x), rows, strict=True)
        points = [(row["kind"], n / unit, row["bits_per_byte"]) for n, row in places]
        train, validation = (
            np.array([(n, loss) for kind, n, loss in points if kind == name]).reshape(-1, 2).T
            for name in ("train", "validation")
        )
        last = (validation if validation.size else train)[1, -1]
        axes.plot(train[0], smooth(train[1]), color=color, alpha=0.45, lw=1)
        axes.plot(*validation, "o-", color=color, label=f"{run}  {last:.3f}")
        late += list(validation[1, validation.shape[1] // 2 :])
    if late:  # without the steep start
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.25 * max(late)))
    axes.set_title("Loss (bits per byte)")
    axes.set_xlabel(X_LABELS[x])
    axes.xaxis.set_major_formatter(thousands if x != "tokens" else lambda n, _: short(n))
    axes.legend()
    note(figure, "Thin line: training loss, smoothed. Dots: validation loss.")


def positions(rows: Rows, x: XAxis) -> list[float]:
    """Return where each row of metrics.jsonl is on the x axis.

    step: completed steps. tokens: tokens trained on. time: seconds of training and validation; the
    time of steps that were not logged is estimated.
    """
    places, step, tokens, seconds = [], 0, 0.0, 0.0
    for row in rows:
        n_steps = 1
        if row["kind"] == "train":
            n_steps, step = max(row["step"] - step, 0), row["step"]
            tokens += n_steps * row.get("tokens", 0)
        seconds += n_steps * row.get("seconds", 0)
        places.append({"step": row["step"], "tokens": tokens, "time": seconds}[x])
    return places


def plot_positions(evaluation: dict[str, Any], path: Path) -> None:
    """Plot the loss against the number of tokens before a token in its context.

    Positions with fewer than MIN_TOKENS tokens are left out, since their mean is mostly noise.
    """
    with new_figure(path) as (figure, (axes,)):
        for color, (name, result) in zip(COLORS, evaluation["protocols"].items(), strict=False):
            bins = [row for row in result["by_position"] if row["tokens"] >= MIN_TOKENS]
            middles = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in bins]
            bits = [row["nats_per_token"] / math.log(2) for row in bins]
            label = f"{name}: {result['bits_per_byte']:.3f} bits per byte"
            axes.plot(middles, bits, "o-", color=color, label=label)
        which = checkpoint_label(evaluation.get("checkpoint"), evaluation.get("step"))
        axes.set_title(f"Loss by position, {evaluation['split']} split, {which} (bits per token)")
        axes.set_xlabel("position in the context")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(thousands)
        axes.legend()
        note(figure, f"Each point is the mean over positions with at least {MIN_TOKENS} tokens.")


def smooth(values: Sequence[float], share: float = 0.02) -> list[float]:
    """Return the running mean over about `share` of all values."""
    decay = 1 - 1 / max(1.0, share * len(values))
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means


@contextmanager
def new_figure(path: Path, rows: int = 1, columns: int = 1, height: float = 3.4) -> Iterator[Any]:
    """Yield a figure and its axes, a list by row and column; then write it to a PNG file.

    The file is complete or absent. Nothing is written if the body raises.
    """
    style = import_extra("matplotlib.style", "a figure", "matplotlib")
    new = import_extra("matplotlib.figure", "a figure", "matplotlib").Figure
    with style.context(["default", STYLE]):
        figure = new(figsize=(WIDTH, height * rows), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, list(axes.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            figure.savefig(partial, format="png")


def note(figure: Any, text: str) -> None:
    """Write an explanation below the figure, on the left."""
    figure.supxlabel(text, x=0.015, ha="left", fontsize=9.5, color=MUTED)


def thousands(value: float, _: object = None) -> str:
    """Return a number for a tick label, for example 8,192 or 0.5."""
    return f"{value:,g}" if abs(value) < 1 or value % 1 else f"{value:,.0f}"
