"""Runs side by side as one record: their curves, and what they reach on the test split.

    python -m transformer_vq.bench.compare RUN RUN ... --out benchmarks/small.json

Reads what `tvq train` and `tvq eval` have written; measures nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformer_vq.bench import run_main
from transformer_vq.errors import UserError
from transformer_vq.files import check_can_write, read_verified_json, write_json
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.sizes import sizes

POINTS = 150  # of a training curve that are kept
KEPT = ("kind", "step", "bits_per_byte", "share_in_use", "relative_error")


def record(runs: list[Path], split: str = "test") -> dict[str, Any]:
    """Config, thinned curve and evaluation of every run."""
    found = {}
    for run in runs:
        config = read_config(run)
        rows = read_metrics(run)
        train = [row for row in rows if row["kind"] == "train"]
        if not train:
            raise UserError(f"{run} has no metrics")
        evaluation = run / f"evaluation-{split}.json"
        if not evaluation.is_file():
            raise UserError(f"{run} has not been evaluated; run `tvq eval {run} --split {split}`")
        every = max(1, len(train) // POINTS)
        kept = {row["step"] for row in train[every - 1 :: every]}
        values = config.to_dict()
        values["data"] = {"dataset": values["data"]["dataset"]}  # paths are nobody's business
        found[run.name] = {
            "config": values,
            "parameters": sizes(config).parameters,
            "minutes": sum(row["seconds"] for row in rows) / 60,
            "curve": [
                {key: row[key] for key in KEPT if key in row}
                for row in rows
                if row["kind"] == "validation" or row["step"] in kept
            ],
            "evaluation": read_verified_json(evaluation) | {"run": run.name},
        }
    return {"runs": found}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of what the runs reach, each protocol a column."""
    lines = [
        "| run | attention | parameters | updates | tokens | test bits per byte, windowed "
        "| streaming |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in result["runs"].items():
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.compare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of evaluated runs")
    parser.add_argument("--split", default="test", help="which evaluation to take")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    options = parser.parse_args(arguments)
    check_can_write("--out", options.out, options.overwrite)
    result = record(options.runs, options.split)
    if options.out:
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    run_main(main)
