"""Figures of `tvq bench variants` and `tvq bench scaling`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from transformer_vq.bench.power_law import curve
from transformer_vq.bench.scaling import CODES, PAPER_FACTOR, SIZES, points
from transformer_vq.bench.trial_records import ScalingRecord, TrialRow, VariantsRecord
from transformer_vq.bench.variants import by_variant
from transformer_vq.training.plot_style import (
    BLUE,
    COLORS,
    VERMILION,
    label_end,
    log_lengths,
    new_figure,
    note,
    thousands,
)

MIN_TOKENS = 1000  # of a position bin that is shown
FIRST_POSITION = 64  # earlier positions have no context to compare


def plot_variants(record: VariantsRecord, path: Path) -> None:
    """Plot the test loss of every seed by variant, and the loss by position in the context."""
    groups = by_variant(record)
    with new_figure(path, columns=2, height=3.8) as (figure, (left, right)):
        for x, rows in enumerate(groups.values()):
            color = COLORS[x % len(COLORS)]
            bits = [row["test"] for row in rows]
            left.plot([x] * len(bits), bits, "o", color=color, ms=6, alpha=0.55, mew=0)
            left.plot([x - 0.22, x + 0.22], [mean(bits)] * 2, color=color)
        slant = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        left.set_xticks(range(len(groups)), list(groups), **(slant if len(groups) > 4 else {}))
        left.grid(visible=False, axis="x")
        left.margins(x=0.15)
        left.set_title("Test loss (bits per byte)")
        first = next(iter(groups))
        log_lengths(right, _draw_positions(right, groups), "tokens of context")
        right.set_title(f"Loss by position, minus that of {first}")
        right.set_ylabel("nats per token")
        note(
            figure,
            "Left: a dot per seed, a line for the mean; the axis does not start at 0.\nRight: the "
            "mean over seeds on the same tokens; band: one standard deviation.",
        )


def _draw_positions(axes: Any, groups: dict[str, list[TrialRow]]) -> list[int]:
    """Draw the loss by position of each variant; return the positions that have a tick.

    The text at different positions differs, so each loss is compared with that of the first variant
    on the same tokens and with the same seed.
    """
    curves = {
        name: {row["seed"]: _by_position(row) for row in rows} for name, rows in groups.items()
    }
    first = next(iter(curves.values()))
    shown: set[int] = set()
    for number, (name, by_seed) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        pairs = [(by_seed[seed], first[seed]) for seed in by_seed if seed in first]
        xs = sorted(set.intersection(*(a.keys() & b.keys() for a, b in pairs))) if pairs else []
        if not xs:
            continue
        differences = {x: [a[x] - b[x] for a, b in pairs] for x in xs}
        means = [mean(differences[x]) for x in xs]
        axes.plot(xs, means, color=color)
        if len(pairs) > 1:
            deviations = [stdev(differences[x]) for x in xs]
            low = [m - d for m, d in zip(means, deviations, strict=True)]
            high = [m + d for m, d in zip(means, deviations, strict=True)]
            axes.fill_between(xs, low, high, color=color, alpha=0.18, lw=0)
        label_end(axes, (xs, means), name, color)
        shown |= set(xs)
    ticks = sorted(shown)
    return ticks[:: 1 + len(ticks) // 6]


def _by_position(row: TrialRow) -> dict[int, float]:
    """Return the loss by the number of tokens of context, from bins with enough tokens."""
    return {
        position["first"] + 1: position["nats_per_token"]
        for position in row["by_position"]
        if position["first"] + 1 >= FIRST_POSITION and position["tokens"] >= MIN_TOKENS
    }


def plot_scaling(record: ScalingRecord, path: Path) -> None:
    """Plot the test loss by codebook size and by parameters, with the fitted laws."""
    kinds = record["scaling"]
    with new_figure(path, columns=len(kinds), height=3.8) as (figure, axes):
        for panel, kind in zip(axes, kinds, strict=True):
            groups = points(record["trials"], kind)
            for x, values in groups.items():
                panel.plot([x] * len(values), values, "o", color=BLUE, ms=5, alpha=0.6, mew=0)
            fit = record.get(kind)
            if fit is not None:
                assert isinstance(fit, dict)
                panel.plot(fit["x"], curve(fit), color=BLUE)  # type: ignore[arg-type]
                panel.fill_between(fit["x"], fit["low"], fit["high"], color=BLUE, alpha=0.18, lw=0)
            panel.set_xscale("log", base=2)
            xs = list(groups)
            panel.set_xticks(xs, [_short(x) for x in xs])
            panel.set_xticks([], minor=True)
            if kind == CODES:
                _draw_paper(panel, groups)
            panel.set_xlabel("codes per codebook" if kind == CODES else "parameters")
            panel.set_title(
                "By codebook size (bits per byte)" if kind == CODES else "By model size"
            )
        has_fit = any(kind in record for kind in (CODES, SIZES))
        law = " Line: floor + scale x^-exponent, with a 95% bootstrap band." if has_fit else ""
        note(figure, f"A dot per seed.{law}\nThe loss axis does not start at 0.")


def _draw_paper(axes: Any, groups: dict[float, list[float]]) -> None:
    """Draw the paper's factor per doubling through the mean at the largest codebook."""
    xs = list(groups)
    last = mean(groups[xs[-1]])
    steps = range(len(xs))
    values = [last * PAPER_FACTOR ** -(len(xs) - 1 - i) for i in steps]
    if any(2 * a != b for a, b in pairwise(xs)):
        return
    axes.plot(xs, values, "--", color=VERMILION, lw=1.5)
    axes.annotate(
        f"paper: x{PAPER_FACTOR} per doubling",
        (xs[-1], values[0]),
        ha="right",
        va="center",
        color=VERMILION,
        fontsize=9.5,
    )


def _short(x: float) -> str:
    return f"{x / 1e6:.2g}M" if x >= 100_000 else thousands(x)
