"""Turn a run into a model of the package, transformer_vq/models/NAME.

    python benchmarks/package_model.py RUN NAME

It has the best model in bf16, the config without local paths, the tokenizer and a thinned
metrics.jsonl. Two files are written by hand: README.md, and about.json with the data and the
license for the card of an export.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from transformer_vq.files import write_tensors
from transformer_vq.training.checkpoint import load_run, write_config
from transformer_vq.training.metrics import METRICS, read_metrics, write_rows
from transformer_vq.training.packaged import MODELS
from transformer_vq.training.run_list import BEST, MODEL

POINTS = 200  # training rows that are kept


def package_run(run: Path, folder: Path) -> None:
    """Write the best model of a run to the folder of a packaged model."""
    model, tokenizer, config = load_run(run)
    (folder / BEST).mkdir(parents=True, exist_ok=True)
    tensors = {
        name: x.to(torch.bfloat16) if x.is_floating_point() else x
        for name, x in model.state_dict().items()
    }
    write_tensors(folder / BEST / MODEL, tensors, {"config": json.dumps(asdict(model.config))})
    data = replace(config.data, path=(), validation_path=(), test_path=(), cache=None)
    write_config(folder, replace(config, data=data), tokenizer)  # without local paths
    rows = read_metrics(run)
    train = [row for row in rows if row["kind"] == "train"]
    kept = {row["step"] for row in train[:: -max(1, len(train) // POINTS)]}
    write_rows(
        folder / METRICS, [row for row in rows if row["kind"] != "train" or row["step"] in kept]
    )


if __name__ == "__main__":
    package_run(Path(sys.argv[1]), MODELS / sys.argv[2])
