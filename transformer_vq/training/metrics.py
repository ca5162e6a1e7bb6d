"""The log of a run: metrics.jsonl always, TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.files import write_text
from transformer_vq.progress import warn

NAME = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All rows of a run's log; a last line that was cut off by a crash is left out."""
    path = run / NAME
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def rewind(run: Path, step: int, validated_at: int) -> None:
    """Forget what was logged after a checkpoint, so that resuming logs every update once."""
    last = {"train": step, "validation": validated_at}
    rows = [row for row in read_metrics(run) if row["step"] <= last[row["kind"]]]
    write_text(run / NAME, "".join(json.dumps(row) + "\n" for row in rows))


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
                file.write(json.dumps(row) + "\n")
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
    """Raises ValueError if a package that the config asks for is not there."""
    if config.train.tensorboard:
        _summary_writer()
    if config.train.wandb is not None:
        _wandb()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("train.tensorboard: pip install 'transformer-vq[log]'") from None
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("train.wandb: pip install wandb") from None
    return wandb
