"""Find run folders and summarize them. Reads small files only and does not need torch."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.files import read_object
from transformer_vq.training.metrics import METRICS, finite, read_metrics

Status = Literal["finished", "stopped", "running", "no checkpoint", "corrupt"]

MAX_DEPTH = 4
CONFIG, BEST, CHECKPOINTS = "config.json", "best", "checkpoints"  # in a run folder
MODEL, METADATA = "model.safetensors", "training.json"  # in a checkpoint
BUFFERS = ("c_sum", "c_count", "started")
"""Tensors of a model file that are not parameters, by the last part of their name."""


@dataclass(frozen=True)
class RunSummary:
    """What a run has achieved so far; None where it is unknown."""

    path: Path
    status: Status
    step: int | None = None
    """Steps of the newest checkpoint; of a running run, the last step that was logged."""
    steps: int | None = None
    """Steps of the complete run."""
    best_bits_per_byte: float | None = None
    """Lowest validation loss."""
    parameters: int | None = None
    dataset: str | None = None
    bytes: int = 0
    """Size of the folder."""
    changed: float = 0.0
    """Time of the last change, in seconds since 1970."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


def find_runs(folder: Path, max_depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run folders in a folder, in its subfolders, or the folder itself."""
    for parent, folders, _ in os.walk(folder):
        path = Path(parent)
        has_results = (path / METRICS).is_file() or (path / CHECKPOINTS).is_dir()
        if has_results and (path / CONFIG).is_file():  # valid or not
            yield path
            folders.clear()  # runs do not contain runs
        elif len(path.relative_to(folder).parts) >= max_depth:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def summarize(run: Path) -> RunSummary:
    """Return the state of a run; a damaged run has the status "corrupt"."""
    n_bytes, changed = _disk_use(run)
    try:
        values, checkpoint = read_object(run / CONFIG), newest_metadata(run)
        values.pop("format", None)
        config = RunConfig.from_dict(values)
    except (UserError, OSError):
        return RunSummary(run, "corrupt", bytes=n_bytes, changed=changed)
    rows, step, last = read_metrics(run), checkpoint.get("step"), config.train.steps
    status: Status = "stopped" if checkpoint else "no checkpoint"
    if is_running(run):
        status = "running"
    elif checkpoint and step == last == checkpoint.get("validated_at"):
        status = "finished"
    validations = [row for row in finite(rows, "bits_per_byte") if row["kind"] == "validation"]
    return RunSummary(
        path=run,
        status=status,
        step=rows[-1]["step"] if status == "running" and rows else step,
        steps=last,
        best_bits_per_byte=min((row["bits_per_byte"] for row in validations), default=None),
        parameters=_n_parameters(run),
        dataset=dataset_name(config),
        bytes=n_bytes,
        changed=changed,
    )


def model_step(run: Path, checkpoint: str) -> int | None:
    """Return the step of a model that `load_model` describes by `checkpoint`, if it is known."""
    if checkpoint != "best":
        step = checkpoint.removeprefix("step ")
        return int(step) if step.isdecimal() else None
    try:
        with safe_open(run / BEST / MODEL, framework="numpy") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, LookupError, ValueError):
        return None


def checkpoint_label(checkpoint: object, step: object) -> str:
    """Return the name of an evaluated checkpoint with its step, such as "best, step 1,200"."""
    if checkpoint != "best":
        return str(checkpoint)
    return f"best, step {step:,}" if isinstance(step, int) else "best"


def dataset_name(config: RunConfig) -> str:
    """Return a short name of the training data: the first path, or else the dataset."""
    paths = config.data.path
    if config.data.dataset != "text" or not paths:
        return config.data.dataset
    more = f" +{len(paths) - 1}" if len(paths) > 1 else ""
    return f"{Path(paths[0]).name or paths[0]}{more}"


def is_running(run: Path) -> bool:
    """Return whether a process is training the run: whether it holds the lock."""
    try:
        with open(os.open(run / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def newest_metadata(run: Path) -> dict[str, Any]:
    """Return the metadata of the newest valid checkpoint, empty if there is no checkpoint.

    Raises UserError if there are checkpoints, but all are corrupt.
    """
    folders = sorted((run / CHECKPOINTS).glob("step-*"), reverse=True)
    for number, folder in enumerate(folders):
        try:
            return read_object(folder / METADATA)
        except UserError:
            if number == len(folders) - 1:
                raise
    return {}


def _n_parameters(run: Path) -> int | None:
    """Return the number of parameters of a run by the headers of its files; None without any."""
    shapes: dict[str, list[int]] = {}
    with suppress(OSError, SafetensorError), safe_open(run / BEST / MODEL, framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for folder in sorted((run / CHECKPOINTS).glob("step-*"), reverse=True):
        with suppress(UserError):
            index = {} if shapes else read_object(folder / "index.json")["tensors"]
            shapes |= {k: x["shape"] for k, x in index.items() if k.startswith("model/")}
    names = [name for name in shapes if name.rpartition(".")[2] not in BUFFERS]
    return sum(math.prod(shapes[name]) for name in names) or None


def _disk_use(run: Path) -> tuple[int, float]:
    """Return the size of a folder in bytes, and the time of its last change."""
    total, changed = 0, 0.0
    for path in run.rglob("*"):
        with suppress(OSError):  # a running run deletes old checkpoints
            status = path.lstat()
            total += status.st_size * path.is_file()
            changed = max(changed, status.st_mtime if path.suffix.startswith(".json") else 0.0)
    return total, changed
