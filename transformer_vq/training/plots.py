"""Figures of training runs: learning curves and loss by position. Needs matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformer_vq.errors import UserError
from transformer_vq.files import CorruptFileError, read_object
from transformer_vq.progress import short
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.plot_style import COLORS, MUTED, label_end, new_figure, note, thousands
from transformer_vq.training.run_list import checkpoint_label

MIN_TOKENS = 100
"""Fewest tokens for which the mean loss of a position is drawn."""
CUT = 1.25
"""The loss axis ends at this multiple of the highest validation loss."""
LINES = ("-", (0, (4, 2)), "-.", ":")
"""Line styles of several runs; a line remains visible where another one covers it."""
XAxis = Literal["step", "tokens", "time"]
X_LABELS = {"step": "training step", "tokens": "tokens"}
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


def plot_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
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


def plot_comparison(runs: dict[str, list[dict[str, Any]]], path: Path, x: XAxis = "step") -> None:
    """Plot the loss of several runs against steps, tokens or time; labels are on the right.

    runs: rows of metrics.jsonl by the name of the run.
    """
    places = {name: positions(rows, x) for name, rows in runs.items()}
    unit, label = _time_unit(places) if x == "time" else (1.0, X_LABELS[x])
    end = max(max(xs) for xs in places.values()) / unit
    height = max(4.2, 1.2 + 0.27 * len(runs))
    with new_figure(path, height=height) as (figure, (axes,)):
        for number, (name, rows) in enumerate(runs.items()):
            color = COLORS[number % len(COLORS)]
            style = {"color": color, "linestyle": LINES[number // len(COLORS) % len(LINES)]}
            xs = [place / unit for place in places[name]]
            lines = {
                kind: [
                    (place, row["bits_per_byte"])
                    for place, row in zip(xs, rows, strict=True)
                    if row["kind"] == kind
                ]
                for kind in ("train", "validation")
            }
            train = _columns(lines["train"])
            axes.plot(train[0], smooth(train[1]), color=color, alpha=0.35, lw=1)
            line = _columns(lines["validation"])
            if line[0]:
                axes.plot(*line, **style, marker="o", ms=4 if len(line[0]) < 40 else 0)
            else:
                line = train[0], smooth(train[1])
            last = line[1][-1]
            axes.plot([line[0][-1], end], [last] * 2, color=color, ls=":", lw=1, alpha=0.7)
            label_end(axes, ([end], [last]), f"{_shortened(name)}  {last:.3f}", color)
        axes.set_title("Loss (bits per byte)")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(thousands if x != "tokens" else lambda n, _: short(n))
        axes.margins(x=0.02)
        halves = {name: _second_half(rows) for name, rows in runs.items()}
        remark = _zoom_to_validation(axes, halves)
        note(figure, f"Thin line: training loss, smoothed.{remark}")


def positions(rows: list[dict[str, Any]], x: XAxis) -> list[float]:
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
    """Return a name per run: that of its folder, with parent folders where it is not unique."""
    parts = [path.absolute().parts for path in paths]
    names = []
    for own in parts:
        n = 1
        while n < len(own) and sum(other[-n:] == own[-n:] for other in parts) > 1:
            n += 1
        names.append("/".join(own[-n:]) if n < len(own) else str(Path(*own)))
    if len(set(names)) < len(names):
        raise UserError("a run is given twice; give every run once")
    return names


def _second_half(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the later half of the validations, which runs are compared by."""
    found = [row for row in rows if row["kind"] == "validation"]
    return found[len(found) // 2 :]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _time_unit(places: dict[str, list[float]]) -> tuple[float, str]:
    """Return the unit of the time axis in seconds, and its label."""
    longest = max(max(xs) for xs in places.values())
    return (60.0, "minutes") if longest < 2 * 3600 else (3600.0, "hours")


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"...{name[3 - MAX_NAME :]}"


def _draw_loss(axes: Any, rows: list[dict[str, Any]], label: str, style: dict[str, Any]) -> None:
    train = [row for row in rows if row["kind"] == "train"]
    values = smooth([row["bits_per_byte"] for row in train])
    axes.plot([row["step"] for row in train], values, color=style["color"], alpha=0.45, lw=1)
    valid = [row for row in rows if row["kind"] == "validation"]
    if valid:
        line = [row["step"] for row in valid], [row["bits_per_byte"] for row in valid]
        axes.plot(*line, **style, marker="o", ms=4)
        label_end(axes, line, f"{label}\n{line[1][-1]:.3f}", style["color"])


def _zoom_to_validation(axes: Any, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Cut off the steep start of the training loss; return a remark for the note."""
    rows = [row for run in runs.values() for row in run if row["kind"] == "validation"]
    if not rows:
        return ""
    top = CUT * max(row["bits_per_byte"] for row in rows)
    if not top < axes.get_ylim()[1]:
        return " Dots: validation loss."
    axes.set_ylim(top=top)
    return f" Dots: validation loss. Values above {top:.1f} are cut off."


def _draw_health(axes: Any, rows: list[dict[str, Any]], prefix: str, color: str) -> None:
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
