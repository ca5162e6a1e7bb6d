"""Figures of training runs: learning curves and loss by position. Needs matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import CorruptFileError, atomic_write, read_object
from transformer_vq.progress import short
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run_list import checkpoint_label

INK, MUTED, LINE, GRID = "#1f2328", "#57606a", "#8c959f", "#e4e8ec"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, ROSE = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3f9bd1", "#3b4048", "#e0709a"),
)
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, ROSE)
"""Colors that remain distinguishable with color blindness, in the order of their use."""

WIDTH = 8.0
"""Width of every figure in inches: 1,200 pixels, readable if shown 700 pixels wide."""
DPI = 150
END_LABEL = "end label"
"""Mark of the labels at line ends, which are moved apart."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 3,
}

MIN_TOKENS = 100
"""Fewest tokens for which the mean loss of a position is drawn."""
CUT = 1.25
"""The loss axis ends at this multiple of the highest validation loss."""
LINES = ("-", (0, (4, 2)), "-.", ":")
"""Line styles of several runs; a line remains visible where another one covers it."""
Rows = list[dict[str, Any]]
"""Rows of metrics.jsonl."""
XAxis = Literal["step", "tokens", "time"]
X_LABELS = {"step": "training step", "tokens": "tokens", "time": "hours"}
MAX_NAME = 24
"""Longest label of a run, in characters."""
HEALTH = {"share_in_use": ("codes in use", "-"), "relative_error": ("quantization error", "--")}
"""Name and line style of the codebook metrics."""


def plot_run(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write the figures of a run folder and return their paths.

    The learning curves are written to `out` (default: RUN/curves.png). Each RUN/evaluation-*.json
    gets a figure of its loss by position next to it. Raises UserError if the folder has no metrics.
    """
    run = Path(run)
    rows = read_metrics(run)
    if not rows:
        raise UserError(f"{run} has no metrics to plot; give a run folder with a metrics.jsonl")
    curves = run / "curves.png" if out is None else Path(out)
    plot_curves({run.name: rows}, curves)
    written = [curves]
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_object(path)
            plot_positions(evaluation, path.with_suffix(".png"))
        except CorruptFileError as error:
            raise UserError(f"{error}; write it again with `tvq eval {run}`") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path} is not an evaluation; write it again with `tvq eval {run}`"
            ) from error
        written.append(path.with_suffix(".png"))
    return written


def plot_curves(runs: dict[str, Rows], path: Path) -> None:
    """Plot the loss and the codebook health of several runs.

    runs: rows of metrics.jsonl by the name of the run.
    """
    with new_figure(path, columns=2) as (figure, (left, right)):
        for number, (name, rows) in enumerate(runs.items()):
            color = COLORS[number % len(COLORS)]
            style = {"color": color, "linestyle": LINES[number % len(LINES)]}
            _draw_loss(left, rows, name if len(runs) > 1 else "validation", style)
            _draw_health(right, rows, f"{name}:\n" if len(runs) > 1 else "", color)
        left.set_title("Loss (bits per byte)")
        right.set_title("Codebooks, mean over layers")
        right.set_ylim(0, 1.03)
        for axes in (left, right):
            axes.set_xlabel("training step")
            axes.xaxis.set_major_formatter(thousands)
        if not right.lines:
            right.set_axis_off()
            text = "Full attention has no codebooks."
            style = {"ha": "center", "color": MUTED, "transform": right.transAxes}
            right.text(0.5, 0.5, text, **style)
        note(figure, "Thin line: training loss, smoothed." + _zoom_to_validation(left, runs))


def compare_runs(paths: Sequence[Path], out: Path, x: XAxis = "step") -> None:
    """Plot the training and validation loss of several run folders in one figure.

    x: what the loss is plotted against; see `positions`. Raises UserError if a folder has no
    metrics.
    """
    runs = {}
    for name, path in zip(run_names(paths), paths, strict=True):
        runs[name] = read_metrics(path)
        if not any(row["kind"] == "train" for row in runs[name]):
            raise UserError(f"{path} has no metrics to plot; give run folders with a metrics.jsonl")
    plot_comparison(runs, out, x)


def plot_comparison(runs: dict[str, Rows], path: Path, x: XAxis = "step") -> None:
    """Plot the loss of several runs against steps, tokens or time; labels are on the right.

    runs: rows of metrics.jsonl by the name of the run.
    """
    unit = 3600.0 if x == "time" else 1.0
    places = {name: [n / unit for n in positions(rows, x)] for name, rows in runs.items()}
    end = max(max(xs) for xs in places.values())
    height = max(4.2, 1.2 + 0.27 * len(runs))
    with new_figure(path, height=height) as (figure, (axes,)):
        for number, (name, rows) in enumerate(runs.items()):
            color = COLORS[number % len(COLORS)]
            style = {"color": color, "linestyle": LINES[number // len(COLORS) % len(LINES)]}
            train, line = (_line(rows, places[name], kind) for kind in ("train", "validation"))
            train = train[0], smooth(train[1])
            axes.plot(*train, color=color, alpha=0.35, lw=1)
            if line[0]:
                axes.plot(*line, **style, marker="o", ms=4 if len(line[0]) < 40 else 0)
            else:
                line = train
            last = line[1][-1]
            axes.plot([line[0][-1], end], [last] * 2, color=color, ls=":", lw=1, alpha=0.7)
            label_end(axes, ([end], [last]), f"{_shortened(name)}  {last:.3f}", color)
        axes.set_title("Loss (bits per byte)")
        axes.set_xlabel(X_LABELS[x])
        axes.xaxis.set_major_formatter(thousands if x != "tokens" else lambda n, _: short(n))
        axes.margins(x=0.02)
        note(figure, "Thin line: training loss, smoothed." + _zoom_to_validation(axes, runs))


def positions(rows: Rows, x: XAxis) -> list[float]:
    """Return where each row of metrics.jsonl is on the x axis.

    step: completed steps. tokens: tokens trained on. time: seconds of training and validation; the
    time of steps that were not logged is estimated.
    """
    places, step, tokens, seconds = [], 0, 0.0, 0.0
    for row in rows:
        if row["kind"] == "train":
            n_steps = max(row["step"] - step, 0)
            step = row["step"]
            tokens += n_steps * row.get("tokens", 0)
            seconds += n_steps * row.get("seconds", 0)
        else:
            seconds += row.get("seconds", 0)
        places.append({"step": row["step"], "tokens": tokens, "time": seconds}[x])
    return places


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a name per run: that of its folder, or its path if several folders have that name."""
    absolute = [path.absolute() for path in paths]
    if len(set(absolute)) < len(absolute):
        raise UserError("a run is given twice; give every run once")
    names = [path.name for path in absolute]
    return [path.name if names.count(path.name) == 1 else str(path) for path in absolute]


def _line(rows: Rows, places: Sequence[float], kind: str) -> tuple[list[float], list[float]]:
    """Return the places and the losses of all rows of a kind."""
    points = zip(places, rows, strict=True)
    chosen = [(place, row["bits_per_byte"]) for place, row in points if row["kind"] == kind]
    return [x for x, _ in chosen], [y for _, y in chosen]


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"...{name[3 - MAX_NAME :]}"


def _draw_loss(axes: Any, rows: Rows, label: str, style: dict[str, Any]) -> None:
    steps = [row["step"] for row in rows]
    train, line = (_line(rows, steps, kind) for kind in ("train", "validation"))
    axes.plot(train[0], smooth(train[1]), color=style["color"], alpha=0.45, lw=1)
    if line[0]:
        axes.plot(*line, **style, marker="o", ms=4)
        label_end(axes, line, f"{label}\n{line[1][-1]:.3f}", style["color"])


def _zoom_to_validation(axes: Any, runs: dict[str, Rows]) -> str:
    """Cut off the steep start of the losses; return a remark for the note.

    The axis ends above the validations in the later half of every run.
    """
    by_run = [[r["bits_per_byte"] for r in x if r["kind"] == "validation"] for x in runs.values()]
    losses = [loss for found in by_run for loss in found[len(found) // 2 :]]
    if not losses:
        return ""
    top = CUT * max(losses)
    if not top < axes.get_ylim()[1]:
        return " Dots: validation loss."
    axes.set_ylim(top=top)
    return f" Dots: validation loss. Values above {top:.1f} are cut off."


def _draw_health(axes: Any, rows: Rows, prefix: str, color: str) -> None:
    health = [row for row in rows if row["kind"] == "train" and "share_in_use" in row]
    for key, (label, style) in HEALTH.items():
        if health:
            line = [row["step"] for row in health], smooth([row[key] for row in health])
            axes.plot(*line, style, color=color)
            label_end(axes, line, prefix + label, color)


def plot_positions(evaluation: dict[str, Any], path: Path) -> None:
    """Plot the loss against the number of tokens before a token in its context.

    Positions with fewer than MIN_TOKENS tokens are left out, since their mean is mostly noise.
    """
    with new_figure(path) as (figure, (axes,)):
        n_hidden = 0
        for color, (name, result) in zip(COLORS, evaluation["protocols"].items(), strict=False):
            bins = [row for row in result["by_position"] if row["tokens"] >= MIN_TOKENS]
            n_hidden += len(result["by_position"]) - len(bins)
            if bins:
                middles = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in bins]
                bits = [row["nats_per_token"] / math.log(2) for row in bins]
                label = f"{name}: {result['bits_per_byte']:.3f} bits per byte"
                axes.plot(middles, bits, color=color, marker="o", ms=4, label=label)
        which = checkpoint_label(evaluation.get("checkpoint"), evaluation.get("step"))
        axes.set_title(f"Loss by position, {evaluation['split']} split, {which} (bits per token)")
        axes.set_xlabel("position in the context")
        if axes.lines:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(thousands)
            axes.legend(labelcolor="linecolor")  # the lines cross, so labels would cover them
        else:
            text = f"Every position has fewer than {MIN_TOKENS} tokens."
            style = {"ha": "center", "color": MUTED, "transform": axes.transAxes}
            axes.text(0.5, 0.5, text, **style)
        hidden = f" Left out: {n_hidden} with fewer than {MIN_TOKENS} tokens." * bool(n_hidden)
        note(figure, "Each point is the mean over a range of positions." + hidden)


def smooth(values: list[float], share: float = 0.02) -> list[float]:
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
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("a figure", "matplotlib") from None
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, height * rows), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, list(axes.flat)
        figure.draw_without_rendering()  # the layout, which label positions depend on
        for panel in axes.flat:
            _spread_labels(figure, panel)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            figure.savefig(partial, format="png")


def label_end(
    axes: Any, line: tuple[Sequence[float], Sequence[float]], text: str, color: str
) -> None:
    """Write the name of a line to the right of its last point; nearby labels are moved apart."""
    xs, ys = line
    if math.isfinite(ys[-1]):
        style = {"va": "center", "color": color, "linespacing": 1.25, "annotation_clip": False}
        offset = {"xytext": (10, 0), "textcoords": "offset points"}
        axes.annotate(text, (xs[-1], ys[-1]), gid=END_LABEL, **offset, **style)


def _spread_labels(figure: Any, axes: Any) -> None:
    """Move end labels apart vertically where they overlap, and below the top of the axes."""
    labels = [text for text in axes.texts if text.get_gid() == END_LABEL]
    labels.sort(key=lambda label: label.get_window_extent().y0)
    boxes = [label.get_window_extent() for label in labels]
    frame = axes.get_window_extent()
    bottoms, free = [], frame.y0
    for box in boxes:
        bottoms.append(max(box.y0, free))
        free = bottoms[-1] + box.height
    free = frame.y1
    for i in reversed(range(len(labels))):
        bottoms[i] = min(bottoms[i], free - boxes[i].height)
        free = bottoms[i]
        x, y = labels[i].get_position()
        labels[i].set_position((x, y + (bottoms[i] - boxes[i].y0) * 72 / figure.dpi))


def note(figure: Any, text: str) -> None:
    """Write an explanation below the figure, on the left."""
    if text:
        figure.supxlabel(text, x=0.015, ha="left", fontsize=9.5, color=MUTED)


def thousands(value: float, _: object = None) -> str:
    """Return a number for a tick label, for example 8,192 or 0.5."""
    return f"{value:,g}" if abs(value) < 1 or value % 1 else f"{value:,.0f}"
