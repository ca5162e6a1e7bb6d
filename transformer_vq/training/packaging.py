"""Turn a run into a packaged model.

    python -m transformer_vq.training.packaging RUN NAME

The new folder is transformer_vq/models/NAME: the best model with all floating-point tensors in
bf16, the config without local paths, the tokenizer, and a thinned metrics.jsonl. Two files are
written by hand: README.md, and about.json with the data and the license for the card of an export.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from transformer_vq.config import RunConfig
from transformer_vq.files import write_tensors
from transformer_vq.training.checkpoint import (
    BEST,
    MODEL,
    load_model,
    read_config,
    read_tokenizer,
    write_config,
)
from transformer_vq.training.metrics import NAME as METRICS
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.packaged import MODELS
from transformer_vq.training.rows import write_rows

POINTS = 200  # training rows that are kept


def package_run(run: Path, folder: Path) -> None:
    """Write the best model of a run to the folder of a packaged model."""
    model, _ = load_model(run)
    tokenizer = read_tokenizer(run)
    (folder / BEST).mkdir(parents=True, exist_ok=True)
    tensors = {
        name: x.to(torch.bfloat16) if x.is_floating_point() else x
        for name, x in model.state_dict().items()
    }
    write_tensors(folder / BEST / MODEL, tensors, {"config": json.dumps(asdict(model.config))})
    tokenizer.save(folder)
    write_config(folder, _without_data(read_config(run)), tokenizer)
    rows = read_metrics(run)
    train = [row for row in rows if row["kind"] == "train"]
    kept = {row["step"] for row in train[:: -max(1, len(train) // POINTS)]}
    write_rows(
        folder / METRICS, [row for row in rows if row["kind"] != "train" or row["step"] in kept]
    )


def _without_data(config: RunConfig) -> RunConfig:
    """Return the config without the paths of its data, which users do not have."""
    data = replace(config.data, path=(), validation_path=(), test_path=(), weights=(), cache=None)
    return replace(config, data=data)


def main(arguments: Sequence[str]) -> None:
    """Package the run that the command line names."""
    if len(arguments) != 2:
        sys.exit("usage: python -m transformer_vq.training.packaging RUN NAME")
    folder = MODELS / arguments[1]
    package_run(Path(arguments[0]), folder)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
