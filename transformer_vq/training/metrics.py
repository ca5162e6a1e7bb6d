"""What a run records: metrics.jsonl and history.jsonl; TensorBoard and Weights & Biases on request.

Rows of metrics.jsonl have a `kind` ("train" or "validation") and a `step`. RUN/history.jsonl has
one row per start, resume, extension, finish or stop. Resuming never removes rows of the history, so
it also shows which steps were trained again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_vq.config import RunConfig
from transformer_vq.errors import import_extra
from transformer_vq.files import write_text
from transformer_vq.progress import warn

if TYPE_CHECKING:
    from transformer_vq.parallel.world import World  # imports torch

METRICS, HISTORY = "metrics.jsonl", "history.jsonl"
Row = dict[str, Any]
Event = Literal["start", "resume", "extend", "finish", "stop"]


def read_rows(path: Path, **types: type) -> list[Row]:
    """Return all valid rows of a file of JSON lines; an empty list if it does not exist.

    types: of the values that a valid row has. Warns about corrupt lines. An unfinished last line is
    skipped silently, because any crash can cause one.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [_parse(line, types) for line in lines]
    if corrupt := [number for number, row in enumerate(rows, start=1) if row is None]:
        what = f"{len(corrupt)} of {len(rows)} lines, which are corrupt"
        warn(f"{path}: skipped {what} (the first is line {corrupt[0]})")
    return [row for row in rows if row is not None]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a file of JSON lines atomically."""
    write_text(path, "".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _parse(text: bytes, types: dict[str, type]) -> Row | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(row, dict) and all(type(row.get(k)) is t for k, t in types.items())
    return row if is_valid else None


def read_metrics(run: Path) -> list[Row]:
    """Return all valid rows of metrics.jsonl; see `read_rows`."""
    return read_rows(run / METRICS, kind=str, step=int)


def finite(rows: list[Row], key: str) -> list[Row]:
    """Return the rows that have a finite number for a key."""
    numbers = [row for row in rows if isinstance(row.get(key), (int, float))]
    return [row for row in numbers if math.isfinite(row[key])]


def rewind(run: Path, step: int, logged_at: int, validated_at: int) -> None:
    """Remove the rows logged after a checkpoint, so that a resumed run logs every step once.

    Warn if rows before it are missing. step: of the checkpoint. logged_at, validated_at: steps of
    the last logged step and of the last validation before it.
    """
    last = {"train": step, "validation": validated_at}
    rows = [row for row in read_metrics(run) if row["step"] <= last.get(row["kind"], step)]
    found = {row["kind"]: row["step"] for row in sorted(rows, key=lambda row: row["step"])}
    first, gaps = found.get("train", 0) + 1, []
    if first <= logged_at:
        is_one = first == logged_at
        gaps.append(f"step {first:,}" if is_one else f"steps {first:,} to {logged_at:,}")
    if found.get("validation", 0) < validated_at:
        gaps.append(f"the validation of step {validated_at:,}")
    if gaps:
        warn(f"{run / METRICS} is incomplete: the rows of {' and '.join(gaps)} are missing")
    write_rows(run / METRICS, rows)


class MetricsLog:
    """Writer of a run's metrics; close it at the end.

    step: number of completed steps. enabled: False on other ranks than 0, which write nothing.
    """

    def __init__(self, run: Path, config: RunConfig, step: int, enabled: bool) -> None:
        self._path, self._enabled, self._failed = run / METRICS, enabled, False
        self._tensorboard = self._wandb = None
        tensorboard, wandb = check_loggers(config) if enabled else (None, None)
        if tensorboard is not None:
            folder = str(run / "tensorboard")
            self._tensorboard = tensorboard.SummaryWriter(folder, purge_step=step + 1)
        if wandb is not None:
            self._wandb = wandb.init(
                project=config.train.wandb,
                name=run.name,
                id=hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(run),
                config=config.to_dict(),
            )

    def write(self, kind: str, step: int, **values: float | None) -> None:
        """Append a row. If that fails, warn once; training continues."""
        if not self._enabled:
            return
        row = {"kind": kind, "step": step, **values}
        try:
            with open(self._path, "a") as file:
                file.write(_line(row))
        except OSError as error:
            if not self._failed:
                warn(f"cannot write {self._path}: {error}")
            self._failed = True
        numbers = {f"{kind}/{name}": x for name, x in values.items() if x is not None}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Finish the TensorBoard and Weights & Biases logs."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_loggers(config: RunConfig) -> tuple[Any, Any]:
    """Return the modules of enabled loggers; raise UserError if one is not installed."""
    tensorboard = wandb = None
    if config.train.tensorboard:
        tensorboard = import_extra("torch.utils.tensorboard", "--train.tensorboard", "tensorboard")
    if config.train.wandb is not None:
        wandb = import_extra("wandb", "--train.wandb")
    return tensorboard, wandb


def read_history(run: str | os.PathLike[str]) -> list[Row]:
    """Return the events of a run, oldest first; an empty list if none are recorded.

    Each row has `time` (ISO 8601, UTC), `event` (see `Event`), `step` (completed steps), `changed`
    (config fields with the old and the new value) and `version` (of this package).
    """
    return read_rows(Path(run) / HISTORY, event=str, step=int)


def record(
    run: Path,
    event: Event,
    step: int,
    world: World,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """Append an event to the history; does nothing on other ranks than 0.

    The file is replaced as a whole. If it cannot be written, warn; training continues.
    """
    from transformer_vq import __version__

    if not world.is_rank_zero:
        return
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        "step": step,
        "changed": {name: list(values) for name, values in (changed or {}).items()},
        "version": __version__,
    }
    try:
        write_rows(run / HISTORY, [*read_history(run), row])
    except OSError as error:
        warn(f"cannot write {run / HISTORY}: {error}")
