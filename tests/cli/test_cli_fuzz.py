"""Random command lines never raise a traceback, hang, or write to files that they do not name."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from cli_sandbox import Sandbox, short_message, snapshot
from command_lines import BASES, OPTIONS, command_line
from forked import Ended

PATIENCE = 5.0  # seconds until a command is interrupted, which must end it
N_QUICK = 14  # one per command
N_SLOW, BATCH = 350, 50

# Files of the given run that a command may replace: its own earlier results.
OWN_RESULTS = {
    "eval": ("evaluation-*.json",),
    "sample": ("samples.png",),
    "plot": ("*.png",),
    "resume": ("*", "*/*", "*/*/*", "*/*/*/*"),
}


def check_result(line: list[str], ended: Ended, sandbox: Sandbox) -> None:
    """Assert that a command succeeded or printed one short message, and changed only its files."""
    assert not ended.timed_out
    assert ended.status in (0, 1, 2, 128 + signal.SIGINT)
    stopped = ended.status == 128 + signal.SIGINT and "stopped" in ended.out
    if ended.status == 0:
        assert ended.out
    elif ended.status == 2:
        short_message(ended.err)
    elif not stopped:
        assert not ended.has_traceback
        assert ended.err.splitlines()[-1].startswith("tvq: ")
    check_changes(line, sandbox)


def check_changes(line: list[str], sandbox: Sandbox) -> None:
    """Assert that no file was overwritten, or written without being named."""
    before, after = sandbox.before, snapshot(sandbox.root)
    command = line[0] if line else ""
    named = [_path(word, sandbox) for word in line[1:]]
    cache = sandbox.home / ".cache" / "transformer_vq"
    places = [*named, cache, *(sandbox.work / name for name in ("runs", "demo", "comparison.png"))]
    for path in before.keys() | after.keys():
        if before.get(path) == after.get(path) or path.name == ".lock" or cache in path.parents:
            continue
        if path not in before:
            is_inside = any(path == place or place in path.parents for place in places)
            is_parent = after[path] == ("folder",) and any(path in x.parents for x in places)
            assert is_inside or is_parent, f"{path} is new and not named"
            continue
        patterns = OWN_RESULTS.get(command, ())
        is_own = any(path.match(str(run / name)) for run in named for name in patterns)
        is_asked = path in named and any(word.startswith("--ov") for word in line)
        assert is_own or is_asked, f"{path} was overwritten or deleted"


def _path(word: str, sandbox: Sandbox) -> Path:
    _, _, value = word.rpartition("=")
    value = value.replace("~", str(sandbox.home), 1) if value.startswith("~/") else value
    return Path(os.path.normpath(sandbox.work / value))


def check(sandbox: Sandbox, numbers: range) -> None:
    wrong = []
    for number in numbers:
        line = command_line(number)
        ended = sandbox.run(line, patience=PATIENCE)
        try:
            check_result(line, ended, sandbox)
        except AssertionError as error:
            typed = shlex.join(["tvq", *line])
            wrong.append(f"command_line({number}): {typed!r}\n{error}\n{ended.err[-2000:]}")
        sandbox.restore()
    assert not wrong, "\n\n".join(wrong)


def test_random_command_lines_end_with_a_result_or_a_short_message(sandbox):
    assert BASES.keys() == OPTIONS.keys()
    check(sandbox, range(N_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(N_QUICK, N_QUICK + N_SLOW, BATCH))
def test_many_random_command_lines_end_with_a_result_or_a_short_message(sandbox, first):
    check(sandbox, range(first, first + BATCH))
