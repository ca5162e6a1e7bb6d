"""The charts of a report: training curves, codebook health, and loss by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_vq.files import CorruptFileError, read_verified_json
from transformer_vq.training.plots import MIN_TOKENS, smooth
from transformer_vq.training.report_page import note, section, table
from transformer_vq.training.run_list import checkpoint_label, model_step
from transformer_vq.training.svg_chart import Line, chart

CLIPPED = 0.1
"""Share of the training, at its start, that may be above the loss axis."""

Row = dict[str, Any]


def training_section(rows: list[Row]) -> str:
    train = [row for row in finite(rows, "bits_per_byte") if row["kind"] == "train"]
    valid = [row for row in finite(rows, "bits_per_byte") if row["kind"] == "validation"]
    if not train and not valid:
        return section("Training", note("No metrics have been logged yet."))
    loss = Line("training, smoothed", *_smooth_line(train, "bits_per_byte"), 1, is_faint=True)
    validation = Line("validation", *_line(valid, "bits_per_byte"), 0, has_dots=True)
    later = [*loss.ys[int(CLIPPED * len(loss.ys)) :]]
    later += [y for x, y in zip(validation.xs, validation.ys, strict=True) if x > 0]
    low, top = (min(later), max(later)) if later else (None, None)
    if low is not None and top is not None:
        low, top = low - 0.05 * (top - low), top + 0.05 * (top - low)
    health = finite([row for row in rows if row["kind"] == "train"], "share_in_use")
    charts = [
        chart("Loss, bits per byte", [loss, validation], y_limits=(low, top)),
        chart("Learning rate", [_of(rows, "lr")], y_limits=(0, None)),
        chart(
            "Codebooks, mean over layers",
            [
                Line("codes in use", *_smooth_line(health, "share_in_use"), 2),
                Line("quantization error", *_smooth_line(health, "relative_error"), 3),
            ],
            y_limits=(0, 1),
        ),
        chart(
            "Codebook perplexity",
            [Line("", *_smooth_line(health, "perplexity"), 2)],
            y_limits=(0, None),
        ),
        chart(
            "Gradient norm, smoothed", [_of(rows, "grad_norm", is_smooth=True)], y_limits=(0, None)
        ),
        chart("Tokens per second", [_of(rows, "tokens_per_second", True)], y_limits=(0, None)),
    ]
    return section("Training", _grid(charts))


def _grid(charts: Sequence[str]) -> str:
    found = [x for x in charts if x]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def _of(rows: list[Row], key: str, is_smooth: bool = False) -> Line:
    """Return the line of one training metric."""
    found = finite([row for row in rows if row["kind"] == "train"], key)
    return Line("", *(_smooth_line if is_smooth else _line)(found, key))


def _line(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows], [row[key] for row in rows]


def _smooth_line(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    found = finite(rows, key)
    return [row["step"] for row in found], smooth([row[key] for row in found])


def finite(rows: list[Row], key: str) -> list[Row]:
    """Return the rows that have a finite number for a key."""
    return [
        row for row in rows if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    ]


def evaluation_section(run: Path) -> str:
    results, charts, notes = [], [], []
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_verified_json(path)
            rows, figure = _evaluation(evaluation)
            notes += _outdated(run, evaluation)
        except (CorruptFileError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, CorruptFileError) else "it has an unknown format"
            notes.append(note(f"{path.name} is left out: {why}"))
            continue
        results += rows
        charts.append(figure)
    heads = ("split", "protocol", "bits per byte", "nats per token", "word perplexity", "tokens")
    return section("Evaluation", table(heads, results, range(2, 6)), _grid(charts), *notes)


def _outdated(run: Path, evaluation: Row) -> list[str]:
    """Return a note if the best model has changed since an evaluation of it."""
    step = model_step(run, "best")
    if evaluation["checkpoint"] != "best" or evaluation.get("step") == step:
        return []
    now = checkpoint_label("best", step)
    return [note(f"The evaluation of {evaluation['split']} is not of the current model ({now}).")]


def _evaluation(evaluation: Row) -> tuple[list[tuple[str, ...]], str]:
    """Return a row per protocol, and the chart of the loss by position."""
    rows: list[tuple[str, ...]] = []
    lines = []
    split = str(evaluation["split"])
    which = checkpoint_label(evaluation["checkpoint"], evaluation.get("step"))
    for number, (name, result) in enumerate(evaluation["protocols"].items()):
        words = result.get("word_perplexity")
        rows.append(
            (
                f"{split} ({which})",
                str(name),
                f"{result['bits_per_byte']:.4f}",
                f"{result['nats_per_token']:.4f}",
                "" if words is None else f"{words:,.4g}",
                f"{result['tokens']:,}",
            )
        )
        bins = [x for x in result["by_position"] if x["tokens"] >= MIN_TOKENS]
        middles = [((x["first"] + 1) * (x["last"] + 1)) ** 0.5 for x in bins]
        bits = [x["nats_per_token"] / math.log(2) for x in bins]
        lines.append(Line(str(name), middles, bits, number % 4, has_dots=True))
    title = f"Loss by position, {split} split, bits per token"
    return rows, chart(title, lines, x_label="position in the context", log_x=True)
