"""Compare runs: their curves and test results in one record.

Reads the files of `tvq train` and `tvq eval`; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from common import Output, Record, config_record, main
from transformer_vq.errors import UserError
from transformer_vq.files import read_object
from transformer_vq.plots import plot_curves
from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics

POINTS = 150  # number of points that are kept of a training curve


KEPT = ("kind", "step", "bits_per_byte", "share_in_use", "relative_error")


def record(runs: Sequence[Path], split: str = "test") -> Record:
    """Return config, thinned curve and evaluation of every run."""
    return {"runs": {run.name: _run_record(run, split) for run in runs}}


def _run_record(run: Path, split: str) -> Record:
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
        "evaluation": read_object(evaluation) | {"run": run.name},
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


def table(record: Record) -> str:
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


RUN_NAMES = {"vq": "Transformer-VQ", "full": "full attention"}


def plot_runs(record: Record, path: Path) -> None:
    """Plot the learning curves of several runs, named by their attention if it differs."""
    runs = record["runs"]
    kinds = {name: run["config"]["model"]["attention"] for name, run in runs.items()}
    if len(set(kinds.values())) == len(kinds):
        kinds = {name: RUN_NAMES.get(kind, kind) for name, kind in kinds.items()}
    else:
        kinds = {name: name for name in kinds}
    plot_curves({kinds[name]: run["curve"] for name, run in runs.items()}, path)


Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Compare evaluated runs: their curves and test results in one record. Measures nothing."""

    runs: Runs
    """Run folders, evaluated with `tvq eval`."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of the evaluation."""


if __name__ == "__main__":
    main(Options, lambda options: record(options.runs, options.split), table, plot_runs)
