"""Progress on stderr: a bar on a terminal, a line now and then elsewhere (log files, CI)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 30.0
IS_SILENT = int(os.environ.get("RANK", 0)) > 0  # of the processes of torchrun the first one speaks

Advance = Callable[..., None]
"""advance(n, note=""): n more are done; the note stands beside the bar."""


class _RateColumn(ProgressColumn):
    """How much is done, of how much, and how fast."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        rate = f"  {short(speed)} {self.unit}/s" if speed else ""
        total = "" if task.total is None else f"/{short(task.total)}"
        return Text(f"{short(task.completed)}{total} {self.unit}{rate}")


class _Console(Console):
    """rich would exit when nobody reads its output; a long run must not."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@contextmanager
def progress_bar(what: str, total: float | None, unit: str, done: int = 0) -> Iterator[Advance]:
    """Show how far some work is; `done` counts what was done before it began."""
    if IS_SILENT:
        yield lambda *_, **__: None
        return
    console = _Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, unit, done)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _RateColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    progress = Progress(*columns, console=console)
    task = progress.add_task(what, total=total, completed=done, note="")

    def advance(n: float, note: str | None = None) -> None:
        if note is None:
            progress.update(task, advance=n)
        else:
            progress.update(task, advance=n, note=note)

    # A terminal that has gone must not end the work: whoever waits for the result still gets it.
    with suppress(OSError):
        progress.start()
    try:
        yield advance
    finally:
        with suppress(OSError):
            progress.stop()


def _lines(what: str, total: float | None, unit: str, done: float) -> Advance:
    start = last = time.monotonic()
    first = done

    def advance(n: float, note: str = "") -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        rate = (done - first) / (now - start)
        of, left = "", ""
        if total is not None:
            of = f"/{short(total)}"
            left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        note = f", {note}" if note else ""
        warn(f"{what}: {short(done)}{of} {unit}, {short(rate)} {unit}/s{left}{note}")

    return advance


def warn(message: str) -> None:
    """Print one line for the user, apart from results; a closed stderr is not an error."""
    if not IS_SILENT:
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def short(n: float) -> str:
    """A number with three or four digits and a letter: 12.3k, 4.56M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if n >= limit:
            return f"{n / divisor:.1f}{letter}"
    return f"{n:.0f}" if n >= 100 or n == int(n) else f"{n:.1f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
