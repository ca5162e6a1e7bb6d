"""Signals that a process sends to itself at an exact moment of a training run.

Hooks are never removed, so install them in a forked child only.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_vq import TransformerVQ
from transformer_vq.training import metrics

Send = Callable[[], None]
Moment = Callable[[Send], None]
"""A function that installs a hook, which sends the signal at this moment."""


@dataclass(frozen=True)
class Interruption:
    """Signals that arrive together, the resulting exit status, and whether the run is saved."""

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
    """Before or after a call of `owner.name` with arguments for which `when` is true."""

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


def _after_forward(n: int, *, training: bool) -> Moment:
    """After the n-th forward pass of all steps, or of all validations, in the process."""
    is_nth = nth(n)
    return in_call(
        TransformerVQ,
        "forward",
        lambda model, *_, **__: model.training == training and is_nth(),
        after=True,
    )


def in_step(step: int) -> Moment:
    """Between the forward and the backward pass of a step."""
    return _after_forward(step + 1, training=True)


def in_validation(n: int) -> Moment:
    """After the n-th span of all validations in the process, counted from 1."""
    return _after_forward(n, training=False)


def before_codebooks(step: int) -> Moment:
    """Between the update of the weights and the update of the codebooks."""
    return in_call(TransformerVQ, "update_codebooks", nth(step + 1))


def in_append(kind: str, step: int) -> Moment:
    """When the first half of a row of metrics.jsonl has been written."""

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

        metrics.open = open_hooked  # shadows the builtin

    return install


def in_rename(path: str, n: int = 1, *, after: bool = False) -> Moment:
    """Before or after a temporary file or folder is renamed to `path`, a regular expression."""
    is_nth = nth(n)
    return in_call(
        os, "replace", lambda _, to: re.search(f"{path}$", f"{to}") and is_nth(), after=after
    )


def in_removal(step: int) -> Moment:
    """During the removal of an old checkpoint, when one of its files is already deleted."""

    def is_moment(folder: Path, **_: object) -> bool:
        if folder.name != f"step-{step:08d}":
            return False
        (folder / "shard-00000.safetensors").unlink()
        return True

    return in_call(shutil, "rmtree", is_moment)


def in_print(text: str) -> Moment:
    """While a line with `text` is written to stderr, so that other writes to it fail."""

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
    """Return a function that is true in its n-th call only."""
    calls = itertools.count(1)
    return lambda *_, **__: next(calls) == n


def sends(moment: Moment, interruption: Interruption) -> Callable[[], None]:
    """Return a hook for a child that sends the signals once, at this moment."""
    is_first = nth(1)

    def send() -> None:
        if is_first():
            for number in interruption.numbers:
                os.kill(os.getpid(), number)

    return lambda: moment(send)
