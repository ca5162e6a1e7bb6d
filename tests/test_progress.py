"""Progress bars, log lines and reporters."""

import io
import logging
import re
import subprocess
import sys
from typing import ClassVar

import pytest

from transformer_vq import progress
from transformer_vq.progress import Task, duration, progress_bar, rate, short


def test_lines_come_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("reading", 100, "B") as advance:
        for _ in range(4):
            advance(10, note="fine")
    lines = capsys.readouterr().err.splitlines()
    # 20 s apart, at least 30 s between two lines: the second and fourth call print one.
    assert lines == [
        "reading: 20/100 B, 2:40 left, fine, 2 s/B",
        "reading: 40/100 B, 2:00 left, fine, 2 s/B",
    ]


def test_what_was_done_before_does_not_count_for_the_rate(monkeypatch, capsys):
    clock = iter([0, 40])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("run", 1000, "steps", done=900) as advance:
        advance(40)
    assert capsys.readouterr().err == "run: 940/1000 steps, 1:00 left, 1 steps/s\n"


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
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.2"),
        (999, "999"),
        (12_345, "12.3k"),
        (4_560_000, "4.6M"),
        (125_000, "125k"),
    ],
)
def test_short_numbers(n, text):
    assert short(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (160, "2:40"), (3723.4, "1:02:03"), (86399, "23:59:59"), (100 * 3600, "4d 4h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("what", ["tiny", "enwik8-190m", "a run with a very long name " * 4])
@pytest.mark.parametrize("done", [1, 120, 99_999])
@pytest.mark.parametrize("seconds", [0.001, 70.0, 3e5, 3e8])
def test_line_of_a_training_run_fits_80_columns(what, done, seconds):
    parts = ["2.345 bits/byte", "123k tok/s", "12.3 GB", "100% codes"]
    line = Task(what, 125_000, "steps", 0, start=0.0).line(done, ", ".join(parts), seconds, 80)
    assert len(line) <= 80
    for part in [*parts, f"/{short(125_000)}", " left"]:
        assert part in line
    assert "inf" not in line
    assert " 0.0 " not in line


def test_line_of_a_short_task_shows_everything():
    task = Task("tiny", 600, "steps", 0, start=0.0)
    assert task.line(120, "2.3 bits/byte", 60.0, 80) == (
        "tiny: 120/600 steps, 4:00 left, 2.3 bits/byte, 2 steps/s"
    )
    assert task.line(120, "", 600.0, 80) == "tiny: 120/600 steps, 40:00 left, 5 s/step"


def test_rates_of_slow_steps_are_seconds_per_step():
    assert rate(0.004, "steps") == "250 s/step"
    assert rate(12_345, "tokens") == "12.3k tokens/s"
    assert rate(0, "steps") == ""


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_bar_on_a_terminal_never_wraps(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    note = "2.345 bits/byte, 12.3k tok/s, 1.2 GB, 98% codes"
    with progress_bar("a-long-run-name", 600, "steps") as advance:
        for _ in range(3):
            advance(200, note=note)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all("600/600" in line or "0/600" in line for line in lines)
    assert max(map(len, lines)) <= columns
    assert ("98% codes" in lines[-1]) == (columns >= 80)


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
