"""Bits per byte by codebook size S and by model size, fitted with power laws.

The paper reports that doubling S multiplies the validation loss by about 0.995 (Table 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from common import Flat, Output, Record, check_positive, main
from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.plots import (
    BLUE,
    VERMILION,
    new_figure,
    note,
    thousands,
)
from transformer_vq.presets import PRESETS
from trials import run_grid, spread, trials_of

PAPER_FACTOR = 0.995  # validation loss per doubling of S, enwik8


MIN_POINTS = 3  # of a fit


CODES, SIZES = "codes", "sizes"


def code_variants(base: RunConfig, codes: Sequence[int]) -> dict[str, RunConfig]:
    """Return the base with each codebook size."""
    if base.model.attention != "vq":
        raise UserError("full attention has no codebooks; use --model.attention vq")
    found = {}
    for n_code in sorted(set(codes)):
        if n_code < 1:
            raise UserError(f"--codes {n_code}: must be at least 1")
        found[f"codes-{n_code}"] = replace(base, model=replace(base.model, n_code=n_code))
    return found


def size_variants(base: RunConfig, sizes: Sequence[str]) -> dict[str, RunConfig]:
    """Return the base with other widths and depths; a size such as "128x2" is d_model x n_layer."""
    found = {}
    for size in sizes:
        width, separator, depth = size.partition("x")
        if not (separator and width.isdecimal() and depth.isdecimal()):
            raise UserError(f"--sizes {size!r}: write d_model x n_layer, such as 128x2")
        model = replace(base.model, d_model=int(width), n_layer=int(depth))
        found[f"size-{size}"] = replace(base, model=model)
    return found


def record(rows: list[Record]) -> Record:
    """Return the record of finished trials, with fits where there are enough points."""
    result: Record = {
        "what": "test bits per byte by codebook size and by number of parameters",
        "trials": rows,
        "scaling": [kind for kind in (CODES, SIZES) if points(rows, kind)],
    }
    for kind in (CODES, SIZES):
        groups = points(rows, kind)
        if len(groups) >= MIN_POINTS:
            result[kind] = fit_power_law(groups)
    return result


def points(rows: Sequence[Record], kind: str) -> dict[float, list[float]]:
    """Return the test bits per byte of all seeds, by codebook size or by number of parameters."""
    prefix = "codes-" if kind == CODES else "size-"
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["variant"].startswith(prefix):
            x = row["config"]["model"]["n_code"] if kind == CODES else row["parameters"]
            found.setdefault(float(x), []).append(row["test"])
    return dict(sorted(found.items()))


def table(record: Record) -> str:
    """Return a Markdown table per grid, and the fitted laws."""
    parts = []
    for kind, title in ((CODES, "codes"), (SIZES, "parameters")):
        groups = points(record["trials"], kind)
        if not groups:
            continue
        lines = [
            f"| {title} | seeds | test bits per byte | relative to the previous row |",
            "| ---: | ---: | ---: | ---: |",
        ]
        before: float | None = None
        for x, values in groups.items():
            found = spread(values)
            deviation = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
            ratio = "" if before is None else f"{found['mean'] / before:.4f}"
            lines.append(f"| {x:,.0f} | {len(values)} | {found['mean']:.4f}{deviation} | {ratio} |")
            before = found["mean"]
        parts.append("\n".join(lines))
        if kind in record:
            parts.append(_law(record[kind], "S" if kind == CODES else "N"))
    return "\n\n".join(parts)


def _law(fit: Record, symbol: str) -> str:
    if fit["scale"] == 0:
        return f"Record: {fit['floor']:.4f}, without a dependence on {symbol}."
    low, high = fit["exponent_interval"]
    first, last = fit["factor_interval"]
    text = (
        f"Record: {fit['floor']:.4f} + {fit['scale']:.4g} {symbol}^-{fit['exponent']:.3f} "
        f"(95% of bootstrap samples: exponent {low:.3f} to {high:.3f}); the last doubling of "
        f"{symbol} multiplies the loss by {fit['factor_per_doubling']:.4f} "
        f"({first:.4f} to {last:.4f})"
    )
    return text + (f"; the paper reports about {PAPER_FACTOR} on enwik8." if symbol == "S" else ".")


EXPONENTS = np.geomspace(0.02, 4.0, 400)


SAMPLES = 1000


BAND = (2.5, 97.5)  # percentiles


def fit_power_law(groups: Mapping[float, Sequence[float]], seed: int = 0) -> Record:
    """Record a power law to several values per x; `groups` maps x to the values of its seeds.

    Least squares over the exponent on a grid, with the floor and the scale in closed form; both are
    at least 0. The band and the intervals contain 95% of the fits to bootstrap samples: seeds drawn
    with replacement, separately for every x. They describe the spread over seeds, not whether the
    form of the law is right. At least three x are needed.
    """
    if len(groups) < 3:
        raise ValueError(f"a power law with a floor needs at least 3 points, not {len(groups)}")
    x = np.array(sorted(groups), dtype=float)
    values = [np.asarray(groups[at], dtype=float) for at in x]
    floor, scale, exponent = _fit(x, np.array([v.mean() for v in values]))
    generator = np.random.default_rng(seed)
    fits = np.array(
        [
            _fit(x, np.array([generator.choice(v, len(v)).mean() for v in values]))
            for _ in range(SAMPLES)
        ]
    )
    grid = np.geomspace(x[0], x[-1], 33)
    curves = fits[:, :1] + fits[:, 1:2] * grid ** -fits[:, 2:3]
    low, high = np.percentile(curves, BAND, axis=0)
    factors = _doubling(fits[:, 0], fits[:, 1], fits[:, 2], x[-1])
    return {
        "floor": float(floor),
        "scale": float(scale),
        "exponent": float(exponent),
        "x": grid.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "exponent_interval": _interval(fits[:, 2]),
        "factor_per_doubling": float(_doubling(floor, scale, exponent, x[-1])),
        "factor_interval": _interval(factors),
    }


def curve(fit: Record) -> list[float]:
    """Return the fitted values at `fit["x"]`."""
    return [fit["floor"] + fit["scale"] * x ** -fit["exponent"] for x in fit["x"]]


def _doubling(
    floor: np.ndarray, scale: np.ndarray, exponent: np.ndarray, last: float
) -> np.ndarray:
    """Return the ratio of the fitted values at the largest x and at half of it."""
    at = floor + scale * last**-exponent
    half = floor + scale * (last / 2) ** -exponent
    ratio: np.ndarray = at / half
    return ratio


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, BAND)
    return float(low), float(high)


def _fit(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return floor, scale and exponent with the least squared error."""
    powers = x ** -EXPONENTS[:, None]  # [exponents, points]
    centred = powers - powers.mean(1, keepdims=True)
    scale = (centred * (y - y.mean())).sum(1) / (centred**2).sum(1)
    floor = y.mean() - scale * powers.mean(1)
    # The best fit may have a negative scale or floor; then that parameter is 0.
    free = (scale >= 0) & (floor >= 0)
    no_floor = (powers * y).sum(1) / (powers**2).sum(1)
    scale, floor = (
        np.where(free, scale, np.where(scale < 0, 0.0, no_floor)),
        np.where(free, floor, np.where(scale < 0, y.mean(), 0.0)),
    )
    errors = ((floor[:, None] + scale[:, None] * powers - y) ** 2).sum(1)
    best = int(errors.argmin())
    return floor[best], scale[best], EXPONENTS[best]


def plot_scaling(record: Record, path: Path) -> None:
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
                panel.plot(fit["x"], curve(fit), color=BLUE)
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


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Train a preset with several codebook sizes and model sizes; fit power laws to the loss.

    Every trial is a run in its own folder. If interrupted, run the same command again to continue.
    """

    run: Flat
    codes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Codebook sizes of the first grid."""
    sizes: tuple[str, ...] = ("64x2", "128x2", "256x2")
    """Model sizes of the second grid, as d_model x n_layer."""
    seeds: int = 3
    """Runs per codebook size and per model size."""
    runs: Path = Path("runs/scaling")
    """Folder for the runs."""
    out: Path = Path("runs/scaling.json")
    """JSON file for the results. Trials that it contains are not repeated."""
    overwrite: bool = True
    """Add trials to an existing record."""


def measure(options: Options) -> Record:
    """Train and evaluate all trials that are not recorded; return the record."""
    check_positive(seeds=options.seeds)
    variants = code_variants(options.run, options.codes)
    variants |= size_variants(options.run, options.sizes)
    trials = trials_of(variants, options.seeds)
    return run_grid(trials, options.runs, options.out, record)


if __name__ == "__main__":
    main(Options, measure, table, plot_scaling, base=PRESETS["tiny"])
