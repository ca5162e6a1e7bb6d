"""Figures of training runs: learning curves and loss by position. Needs matplotlib."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import CorruptFileError, atomic_write, read_verified_json
from transformer_vq.training.metrics import read_metrics


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
            evaluation = read_verified_json(path)
        except CorruptFileError as error:
            raise UserError(f"{error}; write it again with `tvq eval {run}`") from error
        plot_positions(evaluation, path.with_suffix(".png"))
        written.append(path.with_suffix(".png"))
    return written


def plot_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the loss and the codebook health of several runs.

    runs: rows of metrics.jsonl by the name of the run.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number}"
        train = [row for row in rows if row["kind"] == "train"]
        steps = [row["step"] for row in train]
        left.plot(steps, smooth([r["bits_per_byte"] for r in train]), color=color, alpha=0.4, lw=1)
        valid = [row for row in rows if row["kind"] == "validation"]
        left.plot(
            [row["step"] for row in valid],
            [row["bits_per_byte"] for row in valid],
            color=color,
            marker="o",
            ms=3,
            label=f"{name}, validation",
        )
        health = [row for row in train if "share_in_use" in row]
        for key, style in (("share_in_use", "-"), ("relative_error", ":")):
            if health:
                right.plot(
                    [row["step"] for row in health],
                    smooth([row[key] for row in health]),
                    style,
                    color=color,
                    label=f"{name}, {key.replace('_', ' ')}",
                )
    left.set_title("loss (pale: training, smoothed)")
    left.set_ylabel("bits per byte")
    right.set_title("codebooks, mean over layers")
    right.set_ylim(0, 1.02)
    for axes in (left, right):
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    if not right.lines:
        text = "full attention has no codebooks"
        right.text(0.5, 0.5, text, ha="center", transform=right.transAxes)
    save_figure(figure, path)


def plot_positions(evaluation: dict[str, Any], path: Path) -> None:
    """Plot the loss against the number of tokens before a token in its context."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for name, result in evaluation["protocols"].items():
        bins = result["by_position"]
        middles = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in bins]
        bits = [row["nats_per_token"] / math.log(2) for row in bins]
        label = f"{name}: {result['bits_per_byte']:.3f} bits per byte"
        axes.plot(middles, bits, marker="o", ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the context (from 1)")
    axes.set_ylabel("bits per token")
    axes.set_title(f"loss by position, {evaluation['split']} split")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def smooth(values: list[float], share: float = 0.02) -> list[float]:
    """Return the running mean over about `share` of all values."""
    decay = 1 - 1 / max(1.0, share * len(values))
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend that needs no display."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("a figure", "matplotlib", "plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a PNG file and close it; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(path) as partial:
            figure.savefig(partial, dpi=120, format="png")
    finally:
        pyplot().close(figure)
