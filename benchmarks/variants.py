"""Variants of a config compared over several seeds: for example VQ and full attention.

Every variant is trained on the same data for the same number of steps. Results are validation and
test bits per byte with their spread over seeds, and the loss by position in long contexts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import (
    Flat,
    Output,
    Record,
    check_positive,
    label_end,
    log_lengths,
    main,
    new_figure,
)
from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.plots import (
    COLORS,
    note,
)
from transformer_vq.presets import PRESETS
from trials import run_grid, spread, trials_of

SYNTAX = "write NAME or NAME:SECTION.FIELD=VALUE,..., such as full:model.attention=full"


def variants_of(base: RunConfig, texts: Sequence[str]) -> dict[str, RunConfig]:
    """Return the configs that texts such as "full:model.attention=full" describe, by name.

    A text without changes names the base config.
    """
    found: dict[str, RunConfig] = {}
    for text in texts:
        name, _, changes = text.partition(":")
        if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UserError(f"--variants {text!r}: {SYNTAX}")
        if name in found:
            raise UserError(f"--variants: {name!r} is given twice; choose another name")
        values = base.to_dict()
        for change in changes.split(",") if changes else []:
            _apply(values, change, text)
        found[name] = RunConfig.from_dict(values)
    if not found:
        raise UserError(f"--variants: give at least one; {SYNTAX}")
    return found


def _apply(values: dict[str, Any], change: str, text: str) -> None:
    """Set one field of a config in its plain form."""
    path, has_value, value = change.partition("=")
    section, _, field = path.strip().replace("-", "_").partition(".")
    if not has_value or field not in values.get(section, {}):
        raise UserError(f"--variants {text!r}: {change!r} does not set a field; {SYNTAX}")
    if section == "train" and field == "seed":
        raise UserError("--variants: the seed is set by --seeds")
    try:
        values[section][field] = json.loads(value)
    except ValueError:
        values[section][field] = value


def record(rows: list[Record]) -> Record:
    """Return the record of finished trials."""
    return {
        "what": "validation and test bits per byte of variants of one config",
        "variants": list(dict.fromkeys(row["variant"] for row in rows)),
        "trials": rows,
    }


def by_variant(record: Record) -> dict[str, list[Record]]:
    """Return the trials of each variant."""
    rows = record["trials"]
    return {name: [row for row in rows if row["variant"] == name] for name in record["variants"]}


def table(record: Record) -> str:
    """Return a Markdown table; the last column is the difference to the first variant.

    The difference is the mean over the seeds that both have, which share initial weights where the
    shapes are equal and the order of the data.
    """
    groups = by_variant(record)
    lines = [
        "| variant | parameters | seeds | validation | test bits per byte | difference "
        "| relative |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    first = next(iter(groups.values()), [])
    for name, rows in groups.items():
        validation, test = (_figures([row[key] for row in rows]) for key in ("validation", "test"))
        pairs = [
            (row["test"], other["test"])
            for row in rows
            for other in first
            if row["seed"] == other["seed"]
        ]
        difference, relative = "", ""
        if pairs and rows is not first:
            difference = _figures([a - b for a, b in pairs], sign=True)
            ratio = spread([a / b - 1 for a, b in pairs])
            relative = f"{ratio['mean']:+.2%}"
        lines.append(
            f"| {name} | {rows[0]['parameters']:,} | {len(rows)} | {validation} | {test} "
            f"| {difference} | {relative} |"
        )
    return "\n".join(lines)


def _figures(values: Sequence[float], sign: bool = False) -> str:
    found = spread(values)
    text = f"{found['mean']:+.4f}" if sign else f"{found['mean']:.4f}"
    return text if found["deviation"] is None else f"{text} ± {found['deviation']:.4f}"


MIN_TOKENS = 1000  # of a position bin that is shown


FIRST_POSITION = 64  # earlier positions have no context to compare


def plot_variants(record: Record, path: Path) -> None:
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


def _draw_positions(axes: Any, groups: dict[str, list[Record]]) -> list[int]:
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


def _by_position(row: Record) -> dict[int, float]:
    """Return the loss by the number of tokens of context, from bins with enough tokens."""
    return {
        position["first"] + 1: position["nats_per_token"]
        for position in row["by_position"]
        if position["first"] + 1 >= FIRST_POSITION and position["tokens"] >= MIN_TOKENS
    }


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Train variants of a preset with several seeds; compare their bits per byte.

    By default these are VQ attention, full attention, and a window without the cache. Every trial
    is a run in its own folder. If interrupted, run the same command again to continue.
    """

    run: Flat
    variants: tuple[str, ...] = (
        "vq",
        "full:model.attention=full",
        "window:model.compressive-cache=false",
    )
    """NAME, or NAME:SECTION.FIELD=VALUE,...; the others are compared to the first."""
    seeds: int = 3
    """Runs per variant."""
    position_len: int | None = None
    """Length of the contexts in which the loss by position is measured; None uses train.seq-len."""
    runs: Path = Path("runs/variants")
    """Folder for the runs."""
    out: Path = Path("runs/variants.json")
    """JSON file for the results. Trials that it contains are not repeated."""
    overwrite: bool = True
    """Add trials to an existing record."""


def measure(options: Options) -> Record:
    """Train and evaluate all trials that are not recorded; return the record."""
    check_positive(seeds=options.seeds)
    variants = variants_of(options.run, options.variants)
    trials = trials_of(variants, options.seeds, options.position_len)
    return run_grid(trials, options.runs, options.out, record)


if __name__ == "__main__":
    main(Options, measure, table, plot_variants, base=PRESETS["tiny"])
