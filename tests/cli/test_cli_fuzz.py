"""Random command lines never raise a traceback, hang, or write to files that they do not name."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from cli_sandbox import WROTE_OUTSIDE, Sandbox, snapshot
from command_lines import BASES, OPTIONS, command_line
from forked import Ended

from transformer_vq.cli.main import COMMANDS

PATIENCE = 5.0  # seconds until a command is interrupted, which must end it
N_QUICK = 40
N_SLOW, BATCH = 600, 50

# Files of the given run that a command may replace: its own earlier results.
OWN_RESULTS = {
    "eval": ("evaluation-*.json",),
    "sample": ("samples.png",),
    "plot": ("*.png",),
    "resume": ("*", "*/*", "*/*/*", "*/*/*/*"),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("fuzz") / "sandbox")


def problem(line: list[str], ended: Ended, sandbox: Sandbox) -> str | None:
    """Return what is wrong with how a command ended, or None."""
    if ended.timed_out:
        return "hangs"
    if ended.has_traceback or "this is a bug" in ended.err:
        return "traceback"
    if ended.status == WROTE_OUTSIDE:
        return "writes outside the sandbox"
    if ended.status not in (0, 1, 2, 128 + signal.SIGINT):
        return f"exit status {ended.status}"
    stopped = ended.status == 128 + signal.SIGINT and "stopped" in ended.out
    if ended.status != 0 and not stopped:
        lines = [x for x in ended.err.split("\n") if x.strip()]
        if [x.startswith("tvq: ") for x in lines].count(True) != 1:
            return "not exactly one line that starts with tvq:"
        if not lines[-1].startswith("tvq: ") or not lines[-1].removeprefix("tvq: ").strip():
            return "the last line is not the error"
    if ended.status == 0 and not ended.out:
        return "success without a result"
    return _wrong_change(line, sandbox)


def _wrong_change(line: list[str], sandbox: Sandbox) -> str | None:
    """Return a file that was overwritten, or written without being named, or None."""
    before, after = sandbox.before, snapshot(sandbox.root)
    command = line[0] if line else ""
    named = [_path(word, sandbox) for word in line[1:]]
    cache = sandbox.home / ".cache" / "transformer_vq"
    places = [*named, cache, *(sandbox.work / name for name in ("runs", "demo", "comparison.png"))]
    if command == "plot":
        places += [path.with_suffix(".png") for path in named if path.suffix]
    for path in before.keys() | after.keys():
        if before.get(path) == after.get(path) or path.name == ".lock" or cache in path.parents:
            continue
        if path not in before:
            is_inside = any(path == place or place in path.parents for place in places)
            is_parent = after[path] == ("folder",) and any(path in x.parents for x in places)
            if not (is_inside or is_parent):
                return f"{path} is new and not named"
        elif not (_is_own(path, command, named) or _overwrites(path, line, named)):
            return f"{path} was overwritten or deleted"
    return None


def _path(word: str, sandbox: Sandbox) -> Path:
    _, _, value = word.rpartition("=")
    value = value.replace("~", str(sandbox.home), 1) if value.startswith("~/") else value
    return Path(os.path.normpath(sandbox.work / value))


def _is_own(path: Path, command: str, named: list[Path]) -> bool:
    patterns = OWN_RESULTS.get(command, ())
    return any(path.match(str(run / name)) for run in named for name in patterns)


def _overwrites(path: Path, line: list[str], named: list[Path]) -> bool:
    return path in named and any(word.startswith("--ov") for word in line)


def check(sandbox: Sandbox, numbers: range) -> None:
    wrong = []
    for number in numbers:
        line = command_line(number)
        ended = sandbox.run(line, patience=PATIENCE)
        found = problem(line, ended, sandbox)
        if found is not None:
            typed = shlex.join(["tvq", *line])
            wrong.append(f"command_line({number}) {found}: {typed!r}\n{ended.err[-2000:]}")
        sandbox.restore()
    assert not wrong, "\n\n".join(wrong)


def test_random_command_lines_cover_every_command():
    assert set(OPTIONS) == COMMANDS.keys()
    assert set(BASES) == set(OPTIONS)
    lines = [" ".join(command_line(number)) for number in range(N_QUICK)]
    assert all(any(line.startswith(command) for line in lines) for command in OPTIONS)


def test_random_command_lines_end_with_a_result_or_one_line(sandbox):
    check(sandbox, range(N_QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(N_QUICK, N_QUICK + N_SLOW, BATCH))
def test_many_random_command_lines_end_with_a_result_or_one_line(sandbox, first):
    check(sandbox, range(first, first + BATCH))
