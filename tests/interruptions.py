"""Signals that a process sends to itself at an exact moment of a training run.

The hooks stay in place: install them in a forked child only.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_vq import TransformerVQ
from transformer_vq.training import metrics
from transformer_vq.training.step import Trainer

Send = Callable[[], None]
Moment = Callable[[Send], None]
"""Installs a hook that sends the signal at this moment."""


@dataclass(frozen=True)
class Interruption:
    """Signals that arrive together, the exit status they lead to, and whether the run is saved."""

    numbers: tuple[int, ...]
    status: int
    saves: bool


INTERRUPTIONS = {
    "SIGTERM": Interruption((signal.SIGTERM,), 143, saves=True),
    "SIGINT": Interruption((signal.SIGINT,), 130, saves=True),
    "SIGHUP": Interruption((signal.SIGHUP,), 129, saves=True),
    "SIGKILL": Interruption((signal.SIGKILL,), -9, saves=False),
    "Ctrl-C twice": Interruption((signal.SIGINT, signal.SIGINT), 130, saves=False),
}


def in_call(
    owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True, *, after: bool = False
) -> Moment:
    """A call of `owner.name` with arguments for which `when` is true: before it, or after it."""

    def install(send: Send) -> None:
        original = getattr(owner, name)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            is_moment = when(*args, **kwargs)
            if is_moment and not after:
                send()
            result = original(*args, **kwargs)
            if is_moment and after:
                send()
            return result

        setattr(owner, name, hooked)

    return install


def in_update(step: int) -> Moment:
    """Between the forward and the backward pass of an update."""

    def install(send: Send) -> None:
        def hook_model(trainer: Trainer, batch: object, at: int, begins: bool) -> bool:
            if at == step:
                trainer.model.register_forward_hook(lambda *_: send())
            return False

        in_call(Trainer, "update", hook_model)(send)

    return install


def before_codebooks(step: int) -> Moment:
    """After the weights were updated and before the codebooks are."""
    return in_call(TransformerVQ, "update_codebooks", nth(step + 1))


def in_validation(window: int) -> Moment:
    """After a window of a validation; counts from 1 over all validations of the process."""
    is_window = nth(window)
    return in_call(
        TransformerVQ,
        "forward",
        lambda model, *_, **__: not model.training and is_window(),
        after=True,
    )


def in_append(kind: str, step: int) -> Moment:
    """When half of a row of metrics.jsonl is written."""

    def install(send: Send) -> None:
        def open_hooked(path: Path, mode: str) -> Any:
            file = open(path, mode)  # noqa: SIM115
            write = file.write

            def write_halves(row: str) -> None:
                if f'"kind": "{kind}", "step": {step},' in row:
                    write(row[: len(row) // 2])
                    file.flush()
                    send()
                    row = row[len(row) // 2 :]
                write(row)

            file.write = write_halves
            return file

        metrics.open = open_hooked  # instead of the builtin

    return install


def in_rename(path: str, count: int = 1, *, after: bool = False) -> Moment:
    """Before or after a complete temporary file or folder gets its name, for the n-th time."""
    is_count = nth(count)
    return in_call(os, "replace", lambda _, to: f"{to}".endswith(path) and is_count(), after=after)


def before_training_json(step: int) -> Moment:
    """When both tensor files of a checkpoint are complete and training.json is not."""
    return in_call(
        os,
        "replace",
        lambda _, path: Path(path).name == "training.json" and f"step-{step:08d}" in f"{path}",
    )


def in_removal(step: int) -> Moment:
    """When an old checkpoint has already lost a file."""

    def is_moment(folder: Path, **_: object) -> bool:
        if folder.name != f"step-{step:08d}":
            return False
        (folder / "model.safetensors").unlink()
        return True

    return in_call(shutil, "rmtree", is_moment)


def in_print(text: str) -> Moment:
    """While a line is written to stderr, so that nothing else can be written to it."""

    def install(send: Send) -> None:
        class Stderr(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, line: Any) -> int:
                if text in bytes(line).decode():
                    send()
                return os.write(2, line)

        sys.stderr = io.TextIOWrapper(io.BufferedWriter(Stderr()), line_buffering=True)

    return install


def nth(n: int) -> Callable[..., bool]:
    """True in the n-th call."""
    calls = itertools.count(1)
    return lambda *_, **__: next(calls) == n


def sends(moment: Moment, interruption: Interruption) -> Callable[[], None]:
    """A hook for a child: send the signals once, at this moment."""
    is_rank_zero = nth(1)

    def send() -> None:
        if is_rank_zero():
            for number in interruption.numbers:
                os.kill(os.getpid(), number)

    return lambda: moment(send)
