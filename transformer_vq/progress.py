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
from typing import Protocol

SECONDS_BETWEEN_LINES = 30.0
IS_SILENT = int(os.environ.get("RANK", 0)) > 0  # under torchrun only rank 0 prints

Advance = Callable[..., None]
"""advance(n, note=""): n more units are done; the note is shown next to the bar."""

_logger = logging.getLogger("transformer_vq")
_reporter: Reporter | None = None


class Reporter(Protocol):
    """Receives the progress and messages of long work."""

    def progress(
        self, what: str, total: float | None, unit: str, done: float = 0
    ) -> AbstractContextManager[Advance]:
        """Show the progress of one task; `done` units were finished before it started."""

    def info(self, message: str) -> None:
        """Show what has happened."""

    def warn(self, message: str) -> None:
        """Show something the user should look at."""


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
def progress_bar(what: str, total: float | None, unit: str, done: float = 0) -> Iterator[Advance]:
    """Report the progress of one task to the reporter, if there is one."""
    if _reporter is None:
        yield lambda *_, **__: None
    else:
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
        self, what: str, total: float | None, unit: str, done: float = 0
    ) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        class QuietConsole(Console):
            """rich exits when its output is closed; a long run must not."""

            def on_broken_pipe(self) -> None:
                self.quiet = True

        console = QuietConsole(stderr=True)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=IS_SILENT or not console.is_terminal,
        )
        task = bar.add_task(what, total=total, completed=int(done), count="", note="")
        shown, last = "", time.monotonic()

        def advance(n: float, note: str | None = None) -> None:
            nonlocal done, shown, last
            done += n
            shown = shown if note is None else note
            count = f"{short(done)}{'' if total is None else f'/{short(total)}'} {unit}"
            if not bar.disable:
                bar.update(task, advance=n, count=count, note=shown)
            elif time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.info(f"{what}: {count}{', ' if shown else ''}{shown}")

        # A closed terminal must not end the work: the result is still wanted.
        with suppress(OSError):
            bar.start()
        try:
            yield advance
        finally:
            with suppress(OSError):
                bar.stop()

    def info(self, message: str) -> None:
        """Print one line to stderr; a closed stderr is not an error."""
        if not IS_SILENT:
            with suppress(OSError):
                print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        self.info(message)


def short(n: float) -> str:
    """Format a number with two to four digits and a suffix: 12.3k, 125k, 4.6M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if n >= limit:
            return f"{n / divisor:.{0 if n >= 100 * divisor else 1}f}{letter}"
    return f"{n:.0f}" if n >= 100 or n == int(n) else f"{n:.1f}"
