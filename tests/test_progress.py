"""Progress bars, log lines and reporters."""

import io
import logging
import re
import subprocess
import sys
from unittest.mock import MagicMock, call

import pytest

from transformer_vq import progress
from transformer_vq.progress import progress_bar, short


def test_lines_come_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress_bar("run", 1000, "steps", done=900) as advance:
        for _ in range(4):
            now += 20.0
            advance(10, note="fine")
    # 20 s apart, at least 30 s between two lines: the second and fourth call print one.
    lines = ["run: 920/1000 steps, fine", "run: 940/1000 steps, fine"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_bar_on_a_terminal_never_wraps(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    note = "2.345 bits/byte, 12.3k tok/s, 1.2 GB, 98% codes"
    with progress_bar("tiny", 600, "steps") as advance:
        for _ in range(3):
            advance(200, note=note)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert max(map(len, lines)) <= columns
    assert "2.345 bits/byte" in lines[-1]
    assert ("600/600 steps" in lines[-1] and "98% codes" in lines[-1]) == (columns >= 80)


def test_short_numbers():
    found = [short(n) for n in (0, 0.25, 999, 12_345, 4_560_000)]
    assert found == ["0", "0.2", "999", "12.3k", "4.6M"]


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
    reporter = MagicMock()
    with progress.reporting(reporter):
        progress.warn("one")
        with progress.reporting(None):  # keeps the current reporter
            progress.info("two")
    assert reporter.mock_calls == [call.warn("one"), call.info("two")]
