"""The log of a run: metrics.jsonl always, TensorBoard and Weights & Biases when asked for."""

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
    """Return all rows of a run's log, with a warning if damaged lines had to be left out.

    A last line without an end is left out silently: a crash can always cut it off.
    """
    path = run / NAME
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [_parse(line) for line in lines]
    if damaged := [number for number, row in enumerate(rows, start=1) if row is None]:
        warn(
            f"{path}: {len(damaged)} of {len(rows)} lines are damaged and left out, the first is "
            f"line {damaged[0]}"
        )
    return [row for row in rows if row is not None]


def rewind(run: Path, step: int, validated_at: int) -> None:
    """Forget what was logged after a checkpoint, so that resuming logs every update once."""
    last = {"train": step, "validation": validated_at}
    rows = [row for row in read_metrics(run) if row["step"] <= last[row["kind"]]]
    write_text(run / NAME, "".join(_line(row) for row in rows))


def _line(row: dict[str, Any]) -> str:
    """A row as JSON with a checksum, by which a damaged line can be told from a good one."""
    return json.dumps(row | {CHECKSUM: _checksum(row)}) + "\n"


def _parse(line: bytes) -> dict[str, Any] | None:
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
    """Rows with a kind (train, validation) and a step."""

    def __init__(self, run: Path, config: RunConfig, step: int, writes: bool = True) -> None:
        self._path = run / NAME
        self._failed = False
        self._writes = writes
        self._tensorboard = self._wandb = None
        if not writes:
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
        if not self._writes:
            return
        row = {"kind": kind, "step": step, **values}
        try:
            with open(self._path, "a") as file:
                file.write(_line(row))
        except OSError as error:
            if not self._failed:  # once is enough; training goes on
                warn(f"cannot write {self._path}: {error}")
            self._failed = True
        numbers = {f"{kind}/{name}": x for name, x in values.items() if x is not None}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextmanager
def metrics_log(
    run: Path, config: RunConfig, step: int, writes: bool = True
) -> Iterator[MetricsLog]:
    """The log of a run that stands at `step`; of several processes only one writes."""
    log = MetricsLog(run, config, step, writes)
    try:
        yield log
    finally:
        log.close()


def check_loggers(config: RunConfig) -> None:
    """Raises UserError if a package that the config asks for is not there."""
    if config.train.tensorboard:
        _summary_writer()
    if config.train.wandb is not None:
        _wandb()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("--train.tensorboard", "tensorboard", "log") from None
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise missing_extra("--train.wandb", "wandb", None) from None
    return wandb
