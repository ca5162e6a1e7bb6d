"""Progress and messages of long work: silent in a library, on stderr in the command.

Library code calls `progress_bar`, `info` and `warn`. They go to the reporter of the enclosing
`reporting(...)`. Without one, progress and information are dropped, and warnings go to Python's
logger "transformer_vq".
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 30.0
IS_SILENT = int(os.environ.get("RANK", 0)) > 0  # under torchrun only rank 0 prints

Advance = Callable[..., None]
"""advance(n, note=""): n more units are done; the note is shown next to the bar."""

_logger = logging.getLogger("transformer_vq")
_reporter: Reporter | None = None


class Reporter(Protocol):
    """Receives the progress and messages of long work."""

    def progress(
        self, what: str, total: float | None, unit: str, done: int = 0
    ) -> AbstractContextManager[Advance]:
        """Show the progress of one task; `done` units were finished before it started."""
        ...

    def info(self, message: str) -> None:
        """Show what has happened."""
        ...

    def warn(self, message: str) -> None:
        """Show something the user should look at."""
        ...


@contextmanager
def reporting(reporter: Reporter | None) -> Iterator[None]:
    """Send progress and messages to `reporter`; None keeps the current one."""
    global _reporter
    before = _reporter
    _reporter = before if reporter is None else reporter
    try:
        yield
    finally:
        _reporter = before


@contextmanager
def progress_bar(what: str, total: float | None, unit: str, done: int = 0) -> Iterator[Advance]:
    """Report the progress of one task to the reporter, if there is one."""
    if _reporter is None:
        yield lambda *_, **__: None
        return
    with _reporter.progress(what, total, unit, done) as advance:
        yield advance


def info(message: str) -> None:
    """Report what has happened."""
    if _reporter is not None:
        _reporter.info(message)


def warn(message: str) -> None:
    """Warn the user."""
    if _reporter is None:
        _logger.warning(message)
    else:
        _reporter.warn(message)


class TerminalReporter:
    """A progress bar on a terminal, a line now and then elsewhere (log files, CI)."""

    @contextmanager
    def progress(
        self, what: str, total: float | None, unit: str, done: int = 0
    ) -> Iterator[Advance]:
        if IS_SILENT:
            yield lambda *_, **__: None
            return
        bar = _bar(what, total, unit, done)
        if bar is None:
            yield self._lines(what, total, unit, done)
            return
        progress, task = bar

        def advance(n: float, note: str | None = None) -> None:
            if note is None:
                progress.update(task, advance=n)
            else:
                progress.update(task, advance=n, note=note)

        # A closed terminal must not end the work: the result is still wanted.
        with suppress(OSError):
            progress.start()
        try:
            yield advance
        finally:
            with suppress(OSError):
                progress.stop()

    def info(self, message: str) -> None:
        """Print one line to stderr; a closed stderr is not an error."""
        if not IS_SILENT:
            with suppress(OSError):
                print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        self.info(message)

    def _lines(self, what: str, total: float | None, unit: str, done: float) -> Advance:
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
            self.info(f"{what}: {short(done)}{of} {unit}, {short(rate)} {unit}/s{left}{note}")

        return advance


def _bar(what: str, total: float | None, unit: str, done: int) -> tuple[Any, Any] | None:
    """Return a rich progress bar and its task, or None if stderr is not a terminal."""
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

    class QuietConsole(Console):
        """rich exits when its output is closed; a long run must not."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            rate = f"  {short(speed)} {unit}/s" if speed else ""
            of = "" if task.total is None else f"/{short(task.total)}"
            return Text(f"{short(task.completed)}{of} {unit}{rate}")

    console = QuietConsole(stderr=True)
    if not console.is_terminal:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    progress = Progress(*columns, console=console)
    return progress, progress.add_task(what, total=total, completed=done, note="")


def short(n: float) -> str:
    """Format a number with three or four digits and a suffix: 12.3k, 4.56M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if n >= limit:
            return f"{n / divisor:.1f}{letter}"
    return f"{n:.0f}" if n >= 100 or n == int(n) else f"{n:.1f}"


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
