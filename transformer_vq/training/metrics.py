"""Metrics of a run: always metrics.jsonl, optionally TensorBoard and Weights & Biases.

Rows of metrics.jsonl have a `kind` ("train" or "validation"), a `step` and a CRC-32.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.errors import missing_extra
from transformer_vq.files import write_text
from transformer_vq.progress import warn

NAME = "metrics.jsonl"
CHECKSUM = "crc32"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return all valid rows of metrics.jsonl, without their checksums.

    Warns about corrupt lines. An unfinished last line is skipped silently, because any crash can
    cause one. Returns an empty list if the file does not exist.
    """
    path = run / NAME
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [_parse(line) for line in lines]
    if corrupt := [number for number, row in enumerate(rows, start=1) if row is None]:
        warn(
            f"{path}: skipped {len(corrupt)} of {len(rows)} lines, which are corrupt (the first is "
            f"line {corrupt[0]})"
        )
    return [row for row in rows if row is not None]


def rewind(run: Path, step: int, validated_at: int) -> None:
    """Remove the rows logged after a checkpoint, so that a resumed run logs every step once.

    step: of the checkpoint. validated_at: step of the last validation before it.
    """
    last = {"train": step, "validation": validated_at}
    rows = [row for row in read_metrics(run) if row["step"] <= last[row["kind"]]]
    write_text(run / NAME, "".join(_line(row) for row in rows))


def _line(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON with a checksum."""
    return json.dumps(row | {CHECKSUM: _checksum(row)}) + "\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line without its checksum; None if the line is corrupt."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    checksum = row.pop(CHECKSUM, None)
    return row if checksum == _checksum(row) else None


def _checksum(row: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(row, sort_keys=True).encode()):08x}"


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
