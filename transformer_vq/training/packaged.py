"""Models in the package: run folders that are loaded by name wherever a run is expected.

    tvq sample books --prompt "It was"

A run folder of the same name takes precedence. Packaged models have weights in bf16 and no
checkpoints; they can be evaluated, sampled, exported and fine-tuned, but not resumed.

    python -m transformer_vq.training.packaged RUN NAME

turns a run into transformer_vq/models/NAME: the best model in bf16, the config without local paths,
the tokenizer and a thinned metrics.jsonl. Two files are written by hand: README.md, and about.json
with the data and the license for the card of an export.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from transformer_vq.errors import UserError
from transformer_vq.training.run_list import BEST, CONFIG, MODEL

MODELS = Path(__file__).parents[1] / "models"
ABOUT = "about.json"
"""The data and the license of a packaged model, which its config does not tell."""
_POINTS = 200  # training rows that are kept in a packaged model


def packaged_models() -> list[str]:
    """Return the names of the models in the package."""
    return sorted(path.parent.name for path in MODELS.glob(f"*/{CONFIG}"))


def find_run(name: str | os.PathLike[str]) -> Path:
    """Return the path of a run; for the name of a packaged model, that of its folder.

    Anything that is not such a name is returned as it is, even if it does not exist.
    """
    path = Path(name)
    if path.is_file() or (path / CONFIG).is_file():
        return path
    return MODELS / path if os.fspath(name) in packaged_models() else path


def is_packaged(run: Path) -> bool:
    """Return whether a path is the folder of a packaged model."""
    return run.parent == MODELS


def check_not_packaged(run: Path, name: str) -> None:
    """Raise UserError if a run that would be changed is a packaged model."""
    if is_packaged(run):
        raise UserError(
            f"{name} is a model in the package, which is not changed; fine-tune it with `tvq train "
            f"{name} --train.init-from {name} --data.path YOUR-TEXTS --out RUN`"
        )


def package_run(run: Path, folder: Path) -> None:
    """Write the best model of a run to the folder of a packaged model."""
    import torch

    from transformer_vq.files import write_tensors
    from transformer_vq.training.checkpoint import load_run, write_config
    from transformer_vq.training.metrics import METRICS, read_metrics, write_rows

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
    kept = {row["step"] for row in train[:: -max(1, len(train) // _POINTS)]}
    write_rows(
        folder / METRICS, [row for row in rows if row["kind"] != "train" or row["step"] in kept]
    )


if __name__ == "__main__":
    package_run(Path(sys.argv[1]), MODELS / sys.argv[2])
