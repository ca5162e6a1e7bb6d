"""Find run folders and summarize them. Reads small files only and does not need torch."""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.files import read_object

Status = Literal["finished", "stopped", "running", "no checkpoint", "corrupt"]

MAX_DEPTH = 4
CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
MODEL = "model.safetensors"
BUFFERS = ("c_sum", "c_count", "started")
"""Tensors of a model file that are not parameters, by the last part of their name."""
MAX_HEADER = 2**26  # bytes; the header of a safetensors file is much smaller


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
        if is_run_folder(path):
            yield path
            folders.clear()  # runs do not contain runs
        elif len(path.relative_to(folder).parts) >= max_depth:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def is_run_folder(path: Path) -> bool:
    """Return whether a folder has a config and a log or checkpoints, valid or not."""
    has_results = (path / METRICS).is_file() or (path / CHECKPOINTS).is_dir()
    return has_results and (path / CONFIG).is_file()


def summarize(run: Path) -> RunSummary:
    """Return the state of a run; a damaged run has the status "corrupt"."""
    n_bytes, changed = _disk_use(run)
    try:
        config = read_run_config(run)
        checkpoint = newest_metadata(run)
        metrics = read_run_metrics(run)
    except (UserError, OSError):
        return RunSummary(run, "corrupt", bytes=n_bytes, changed=changed)
    status, step = _status(run, config, checkpoint), checkpoint.get("step")
    if status == "running":
        step = metrics.step if metrics.step is not None else step
    return RunSummary(
        path=run,
        status=status,
        step=step if isinstance(step, int) else None,
        steps=config.train.steps,
        best_bits_per_byte=metrics.best_bits_per_byte,
        parameters=_n_parameters(run),
        dataset=dataset_name(config),
        bytes=n_bytes,
        changed=changed,
    )


def read_run_config(run: Path) -> RunConfig:
    """Return the config of a run, written by any version whose settings are still the same."""
    values = read_object(run / CONFIG)
    sections = {field.name for field in fields(RunConfig)}
    return RunConfig.from_dict({name: x for name, x in values.items() if name in sections})


def model_step(run: Path, checkpoint: str) -> int | None:
    """Return the step of a model that `load_model` describes by `checkpoint`, if it is known."""
    if checkpoint != "best":
        step = checkpoint.removeprefix("step ")
        return int(step) if step.isdecimal() else None
    try:
        with safe_open(run / "best" / MODEL, framework="numpy") as file:
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


def _status(run: Path, config: RunConfig, checkpoint: dict[str, Any]) -> Status:
    if is_running(run):
        return "running"
    if not checkpoint:
        return "no checkpoint"
    last = config.train.steps
    is_finished = checkpoint.get("step") == last == checkpoint.get("validated_at")
    return "finished" if is_finished else "stopped"


def is_running(run: Path) -> bool:
    """Return whether a process is training the run: whether it holds the lock."""
    try:
        with open(os.open(run / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def newest_metadata(run: Path) -> dict[str, Any]:
    """Return the metadata of the newest valid checkpoint, empty if there is no checkpoint.

    Raises UserError if there are checkpoints, but all are corrupt.
    """
    folders = sorted((run / CHECKPOINTS).glob("step-*"), reverse=True)
    for number, folder in enumerate(folders):
        try:
            return read_object(folder / "training.json")
        except UserError:
            if number == len(folders) - 1:
                raise
    return {}


@dataclass(frozen=True)
class LoggedMetrics:
    """The last step and the lowest validation loss in metrics.jsonl."""

    step: int | None = None
    best_bits_per_byte: float | None = None


def read_run_metrics(run: Path) -> LoggedMetrics:
    """Return the last step and the best validation; raise UserError if no line is valid.

    The log may have millions of lines: only validations and the last lines are parsed.
    """
    best: float | None = None
    last: deque[bytes] = deque(maxlen=3)
    try:
        with open(run / METRICS, "rb") as file:
            for line in file:
                last.append(line)
                if b'"validation"' in line and (bits := _number(line, "bits_per_byte")) is not None:
                    best = bits if best is None else min(best, bits)
    except FileNotFoundError:
        return LoggedMetrics()
    steps = [step for line in reversed(last) if (step := _number(line, "step")) is not None]
    if last and not steps and best is None:
        raise UserError(f"{run / METRICS} is corrupt")
    return LoggedMetrics(int(steps[0]) if steps else None, best)


def _number(line: bytes, key: str) -> float | None:
    """Return a finite number of a row; None if the row is corrupt or does not have it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    value = row.get(key) if isinstance(row, dict) and "kind" in row else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) else None


def _n_parameters(run: Path) -> int | None:
    """Return the number of parameters in the header of a model file; None if there is none."""
    newest = sorted((run / CHECKPOINTS).glob(f"step-*/{MODEL}"), reverse=True)
    for path in (run / "best" / MODEL, *newest):
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, MAX_HEADER)))
            header.pop("__metadata__", None)
            sizes = {name: int(math.prod(about["shape"])) for name, about in header.items()}
            return sum(n for name, n in sizes.items() if name.rpartition(".")[2] not in BUFFERS)
        except (OSError, ValueError, struct.error, AttributeError, LookupError, TypeError):
            continue
    return None


def _disk_use(run: Path) -> tuple[int, float]:
    """Return the size of a folder in bytes, and the time of its last change."""
    total, changed = 0, 0.0
    for parent, _, names in os.walk(run):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:  # a running run deletes old checkpoints
                continue
            total += status.st_size
            changed = max(changed, status.st_mtime if name != ".lock" else 0.0)
    return total, changed
