"""Metrics of a run: always metrics.jsonl, optionally TensorBoard and Weights & Biases.

Rows of metrics.jsonl have a `kind` ("train" or "validation"), a `step` and a CRC-32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.errors import missing_extra
from transformer_vq.progress import warn
from transformer_vq.training.rows import line, read_rows, write_rows

NAME = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return all valid rows of metrics.jsonl.

    Warns about corrupt lines. An unfinished last line is skipped silently, because any crash can
    cause one. Returns an empty list if the file does not exist.
    """
    return read_rows(run / NAME, kind=str, step=int)


def finite(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the rows that have a finite number for a key."""
    return [
        row for row in rows if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    ]


def rewind(run: Path, step: int, logged_at: int, validated_at: int) -> None:
    """Remove the rows logged after a checkpoint, so that a resumed run logs every step once.

    Warn if rows before it are missing. step: of the checkpoint. logged_at, validated_at: steps of
    the last logged step and of the last validation before it.
    """
    last = {"train": step, "validation": validated_at}
    rows = [row for row in read_metrics(run) if row["step"] <= last[row["kind"]]]
    found = {
        kind: max((row["step"] for row in rows if row["kind"] == kind), default=0) for kind in last
    }
    gaps = []
    if (first := found["train"] + 1) <= logged_at:
        steps = f"step {first:,}" if first == logged_at else f"steps {first:,} to {logged_at:,}"
        gaps.append(steps)
    if found["validation"] < validated_at:
        gaps.append(f"the validation of step {validated_at:,}")
    if gaps:
        warn(f"{run / NAME} is incomplete: the rows of {' and '.join(gaps)} are missing")
    write_rows(run / NAME, rows)


class MetricsLog:
    """Writer of a run's metrics.

    step: number of completed steps. enabled: False on all ranks but rank 0, where nothing is
    written.
    """

    def __init__(self, run: Path, config: RunConfig, step: int, enabled: bool = True) -> None:
        self._path = run / NAME
        self._failed = False
        self._enabled = enabled
        self._tensorboard = self._wandb = None
        if not enabled:
            return
        if config.train.tensorboard:
            folder = str(run / "tensorboard")
            self._tensorboard = _summary_writer()(folder, purge_step=step + 1)
        if config.train.wandb is not None:
            self._wandb = _wandb().init(
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
                file.write(line(row))
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


@contextmanager
def metrics_log(
    run: Path, config: RunConfig, step: int, enabled: bool = True
) -> Iterator[MetricsLog]:
    """Yield a `MetricsLog`, which is closed at the end."""
    log = MetricsLog(run, config, step, enabled)
    try:
        yield log
    finally:
        log.close()


def check_loggers(config: RunConfig) -> None:
    """Raise UserError if a logger is enabled whose package is not installed."""
    if config.train.tensorboard:
        _summary_writer()
    if config.train.wandb is not None:
        _wandb()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("--train.tensorboard", "tensorboard") from None
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise missing_extra("--train.wandb", "wandb") from None
    return wandb
