"""Variants of a config compared over several seeds: for example VQ and full attention.

Every variant is trained on the same data for the same number of steps. Results are validation and
test bits per byte with their spread over seeds, and the loss by position in long contexts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformer_vq.bench.trial_records import TrialRow, VariantsRecord
from transformer_vq.bench.trials import spread
from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError

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


def record(rows: list[TrialRow]) -> VariantsRecord:
    """Return the record of finished trials."""
    return {
        "what": "validation and test bits per byte of variants of one config",
        "variants": list(dict.fromkeys(row["variant"] for row in rows)),
        "trials": rows,
    }


def by_variant(record: VariantsRecord) -> dict[str, list[TrialRow]]:
    """Return the trials of each variant."""
    rows = record["trials"]
    return {name: [row for row in rows if row["variant"] == name] for name in record["variants"]}


def table(record: VariantsRecord) -> str:
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
