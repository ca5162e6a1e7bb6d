"""Progress bars, log lines and reporters."""

import io
import logging
import subprocess
import sys
from typing import ClassVar

import pytest

from transformer_vq import progress
from transformer_vq.progress import duration, progress_bar, short


def test_lines_come_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("reading", 100, "B") as advance:
        for _ in range(4):
            advance(10, note="fine")
    lines = capsys.readouterr().err.splitlines()
    # 20 s apart, at least 30 s between two lines: the second and fourth call print one.
    assert lines == [
        "reading: 20/100 B, 0.5 B/s, 0:02:40 left, fine",
        "reading: 40/100 B, 0.5 B/s, 0:02:00 left, fine",
    ]


def test_what_was_done_before_does_not_count_for_the_rate(monkeypatch, capsys):
    clock = iter([0, 40])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("run", 1000, "steps", done=900) as advance:
        advance(40)
    assert capsys.readouterr().err == "run: 940/1000 steps, 1 steps/s, 0:01:00 left\n"


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("reading", 100, "B") as advance:
        advance(100, note="all of it")
    err = capsys.readouterr().err
    assert "reading" in err
    assert "100/100 B" in err
    assert "all of it" in err


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (7, "7"), (0.25, "0.2"), (999, "999"), (12_345, "12.3k"), (4_560_000, "4.6M")],
)
def test_short_numbers(n, text):
    assert short(n) == text


def test_durations():
    assert duration(3723.4) == "1:02:03"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_closed_stderr_does_not_end_the_work(monkeypatch, is_terminal):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def isatty(self):
            return is_terminal

    monkeypatch.setattr("sys.stderr", Closed())
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    progress.warn("not read by anyone")
    done = 0
    with progress.progress_bar("work", 3, "steps") as advance:
        for _ in range(3):
            advance(1, note="going well")
            done += 1
    assert done == 3


def test_library_code_is_silent_without_a_reporter():
    program = (
        "from transformer_vq import progress\n"
        "with progress.progress_bar('work', 3, 'steps') as advance:\n"
        "    advance(1, note='going well')\n"
        "progress.info('half done')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")


def test_warnings_without_a_reporter_go_to_the_logger(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_reporter", None)
    progress.warn("look at this")
    assert caplog.record_tuples == [("transformer_vq", logging.WARNING, "look at this")]


def test_a_caller_can_pass_a_reporter():
    class Recorder(progress.TerminalReporter):
        said: ClassVar[list[str]] = []

        def info(self, message):
            self.said.append(message)

    with progress.reporting(Recorder()):
        progress.warn("one")
        with progress.reporting(None):  # keeps the current reporter
            progress.info("two")
    assert Recorder.said == ["one", "two"]
