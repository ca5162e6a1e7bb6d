"""The history of a run: RUN/history.jsonl has one row per start, resume, extension, finish or stop.

Resuming never removes rows, so the history also shows which steps were trained again.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_vq.parallel.world import World
from transformer_vq.progress import warn
from transformer_vq.training.rows import read_rows, write_rows

NAME = "history.jsonl"

Event = Literal["start", "resume", "extend", "finish", "stop"]


def read_history(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first; an empty list if none are recorded.

    Each row has `time` (ISO 8601, UTC), `event` ("start", "resume", "extend", "finish" or "stop"),
    `step` (completed steps), `changed` (config fields with the old and the new value), `version`,
    `torch`, `device`, `processes` and `command` (None if Python code started the run).
    """
    return read_rows(Path(run) / NAME)


def record(
    run: Path,
    event: Event,
    step: int,
    world: World,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """Append an event to the history; does nothing on other ranks than 0.

    The file is replaced as a whole, so a crash cannot leave an unfinished line. If it cannot be
    written, warn; training continues.
    """
    if not world.is_rank_zero:
        return
    from transformer_vq import __version__

    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        "step": step,
        "changed": {name: list(values) for name, values in (changed or {}).items()},
        "version": __version__,
        "torch": str(torch.__version__),
        "device": str(world.device),
        "processes": world.mesh.n_processes,
        "command": _command(),
    }
    try:
        write_rows(run / NAME, [*read_history(run), row])
    except OSError as error:
        warn(f"cannot write {run / NAME}: {error}")


def _command() -> str | None:
    """Return the command line if the command `tvq` is running, else None."""
    program = Path(sys.argv[0])
    if program.name == "tvq":
        return shlex.join(["tvq", *sys.argv[1:]])
    if program.parts[-2:] == ("transformer_vq", "__main__.py"):
        return shlex.join(["python", "-m", "transformer_vq", *sys.argv[1:]])
    return None
