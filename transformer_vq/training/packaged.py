"""Models in the package: run folders that are loaded by name wherever a run is expected.

    tvq sample books --prompt "It was"

A run folder of the same name takes precedence. Packaged models have weights in bf16 and no
checkpoints; they can be evaluated, sampled, exported and fine-tuned, but not resumed.

They are written by benchmarks/package_model.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from transformer_vq.errors import UserError
from transformer_vq.training.metrics import HISTORY
from transformer_vq.training.run_list import CONFIG

MODELS = Path(__file__).parents[1] / "models"
ABOUT = "about.json"
"""The data and the license of a packaged or converted model, which its config does not tell."""
LEGAL = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files with the terms of a converted model."""


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


def has_no_data(run: Path) -> bool:
    """Return whether a model was not trained here: a packaged or a converted one."""
    return is_packaged(run) or ((run / ABOUT).is_file() and not (run / HISTORY).exists())


def check_not_packaged(run: Path, name: str) -> None:
    """Raise UserError if a run that would be changed is a packaged or a converted model."""
    if has_no_data(run):
        command = f"tvq train {name} --train.init-from {name} --data.path YOUR-TEXTS --out RUN"
        kind = "in the package is read-only" if is_packaged(run) else "is a converted model"
        raise UserError(f"{name} {kind}; fine-tune it with `{command}`")
