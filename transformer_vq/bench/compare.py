"""Compare runs: their curves and test results in one record.

Reads the files of `tvq train` and `tvq eval`; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_vq.bench.records import RunRecord, RunsRecord, config_record
from transformer_vq.errors import UserError
from transformer_vq.files import read_verified_json
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.sizes import sizes

POINTS = 150  # number of points that are kept of a training curve
KEPT = ("kind", "step", "bits_per_byte", "share_in_use", "relative_error")


def record(runs: Sequence[Path], split: str = "test") -> RunsRecord:
    """Return config, thinned curve and evaluation of every run."""
    return {"runs": {run.name: _run_record(run, split) for run in runs}}


def _run_record(run: Path, split: str) -> RunRecord:
    config = read_config(run)
    rows = read_metrics(run)
    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        raise UserError(f"{run} has no metrics; give a run folder with a metrics.jsonl")
    evaluation = run / f"evaluation-{split}.json"
    if not evaluation.is_file():
        raise UserError(f"{run} has not been evaluated; run `tvq eval {run} --split {split}`")
    return {
        "config": config_record(config),
        "parameters": sizes(config).parameters,
        "minutes": sum(row["seconds"] for row in rows) / 60,
        "curve": thinned_curve(rows),
        "evaluation": read_verified_json(evaluation) | {"run": run.name},
    }


def thinned_curve(rows: Sequence[dict[str, Any]], points: int = POINTS) -> list[dict[str, Any]]:
    """Return all validations and about `points` training rows of a run's metrics."""
    train = [row for row in rows if row["kind"] == "train"]
    every = max(1, len(train) // points)
    kept = {row["step"] for row in train[every - 1 :: every]}
    return [
        {key: row[key] for key in KEPT if key in row}
        for row in rows
        if row["kind"] == "validation" or row["step"] in kept
    ]


def table(record: RunsRecord) -> str:
    """Return a Markdown table of the test results; each protocol has a column."""
    lines = [
        "| run | attention | parameters | steps | tokens | test bits per byte, windowed "
        "| streaming |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in record["runs"].items():
        train = run["config"]["train"]
        tokens = train["steps"] * train["batch_size"] * train["backprop_len"]
        protocols = run["evaluation"]["protocols"]
        bits = [
            f"{protocols[key]['bits_per_byte']:.4f}" if key in protocols else ""
            for key in ("windowed", "streaming")
        ]
        lines.append(
            f"| {name} | {run['config']['model']['attention']} | {run['parameters']:,} "
            f"| {train['steps']:,} | {tokens:,} | {bits[0]} | {bits[1]} |"
        )
    return "\n".join(lines)
