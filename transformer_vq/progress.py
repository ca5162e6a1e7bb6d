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
from dataclasses import dataclass
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 30.0
LINE_WIDTH = 80  # of progress that is not shown on a terminal
MIN_BAR, MAX_BAR = 5, 24  # characters
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
        task = Task(what, total, unit, done, time.monotonic())
        bar = _bar(task)
        if bar is None:
            yield self._lines(task)
            return
        progress, number = bar

        def advance(n: float, note: str | None = None) -> None:
            # Measured here: the speed must not drop while a step is running.
            seconds = time.monotonic() - task.start
            changes = {} if note is None else {"note": note}
            progress.update(number, advance=n, seconds=seconds, **changes)

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

    def _lines(self, task: Task) -> Advance:
        last, done = task.start, float(task.first)

        def advance(n: float, note: str = "") -> None:
            nonlocal done, last
            done += n
            now = time.monotonic()
            if now - last < SECONDS_BETWEEN_LINES:
                return
            last = now
            self.info(task.line(done, note, now - task.start, LINE_WIDTH))

        return advance


@dataclass(frozen=True)
class Task:
    """Work whose progress is shown. first: units that were done before the time `start`."""

    what: str
    total: float | None
    unit: str
    first: int
    start: float

    def line(self, done: float, note: str, seconds: float, width: int) -> str:
        """Return the progress in one line of at most `width` characters.

        seconds: since the start. If the line is too long, the rate is left out first, then the unit
        and the name, then the last parts of the note.
        """
        speed = (done - self.first) / seconds if seconds > 0 else 0.0
        count, parts = short(done), []
        if self.total is not None:
            count += f"/{short(self.total)}"
            if speed > 0:
                parts.append(f"{duration(max(self.total - done, 0) / speed)} left")
        parts += [part for part in note.split(", ") if part]
        heads = [f"{self.what}: {count} {self.unit}"]
        if speed > 0:
            line = ", ".join([heads[0], *parts, rate(speed, self.unit)])
            if len(line) <= width:
                return line
        heads += [f"{self.what}: {count}", f"{count} {self.unit}", count]
        for n in range(len(parts), -1, -1):
            for head in heads:
                line = ", ".join([head, *parts[:n]])
                if len(line) <= width:
                    return line
        return line[:width]


def _bar(task: Task) -> tuple[Any, Any] | None:
    """Return a rich progress bar and its task, or None if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.progress import Task as BarTask
    from rich.text import Text

    class QuietConsole(Console):
        """rich exits when its output is closed; a long run must not."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    console = QuietConsole(stderr=True)
    if not console.is_terminal:
        return None
    full, empty = "\u2501\u2500" if "utf" in console.encoding else "#-"

    class LineColumn(ProgressColumn):
        """The line of a task, and a bar if there is room for it."""

        def render(self, bar: BarTask) -> Text:
            note, seconds = bar.fields["note"], bar.fields["seconds"]
            line = task.line(bar.completed, note, seconds, console.width - 1)
            text = Text(line, no_wrap=True)
            room = min(console.width - 2 - len(line), MAX_BAR)
            if task.total and room >= MIN_BAR:
                n = min(round(room * bar.completed / task.total), room)
                text.append(" " + n * full, "cyan").append((room - n) * empty, "dim")
            return text

    progress = Progress(LineColumn(), console=console)
    return progress, progress.add_task(
        task.what, total=task.total, completed=task.first, note="", seconds=0.0
    )


def short(n: float) -> str:
    """Format a number with two to four digits and a suffix: 12.3k, 125k, 4.6M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if n >= limit:
            return f"{n / divisor:.{0 if n >= 100 * divisor else 1}f}{letter}"
    return f"{n:.0f}" if n >= 100 or n == int(n) else f"{n:.1f}"


def rate(speed: float, unit: str) -> str:
    """Format units per second; below one, seconds per unit: 2.5 steps/s, 40 s/step."""
    if speed <= 0:
        return ""
    if speed >= 1:
        return f"{short(speed)} {unit}/s"
    return f"{short(1 / speed)} s/{unit.removesuffix('s')}"


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours or days if needed: 2:03, 1:02:03, 4d 4h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
