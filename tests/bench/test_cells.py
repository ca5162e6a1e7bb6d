"""Measurements in a subprocess: memory and time limits, errors and signals."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_vq.bench.cells import check_limits, in_subprocess, over_time
from transformer_vq.bench.steps import Cell, timed_steps
from transformer_vq.errors import MissingExtraError, UserError, missing_extra

SMALL = {"d_model": 16, "d_k": 8, "n_code": 7, "block_len": 4, "device": "cpu"}
OPTIONS = [x for k, v in SMALL.items() for x in ("--" + k.replace("_", "-"), str(v))]


def test_cell_above_the_memory_limit_is_out_of_memory():
    cell = Cell("shga", "full", "auto", 16_384, **SMALL)
    assert in_subprocess(timed_steps, cell, memory_gb=1.0) == {"failed": "out of memory"}


def test_subprocess_above_the_time_limit_is_killed():
    assert in_subprocess(time.sleep, 600, seconds=0.1) == {
        "failed": "exceeded the time limit of 0.1 s"
    }


def test_over_time_reports_the_time_limit_as_given():
    assert over_time(1500.0) == "exceeded the time limit of 1,500 s"
    assert over_time(0.25) == "exceeded the time limit of 0.25 s"


def fail(how: str) -> None:
    raise {
        "extra": missing_extra("gpt2", "transformers"),
        "file": FileNotFoundError(2, "No such file", "data.txt"),
        "bug": ValueError("a bug"),
    }[how]


@pytest.mark.parametrize(
    ("how", "kind"),
    [("extra", MissingExtraError), ("file", FileNotFoundError)],
)
def test_user_error_in_the_subprocess_is_raised_by_the_parent(how, kind):
    with pytest.raises(kind) as here:
        fail(how)
    with pytest.raises(kind) as raised:
        in_subprocess(fail, how)
    assert type(raised.value) is kind
    assert str(raised.value) == str(here.value)


def test_bug_in_the_subprocess_shows_its_traceback():
    with pytest.raises(ValueError, match="a bug") as raised:
        in_subprocess(fail, "bug")
    assert not isinstance(raised.value, UserError)
    assert any("in fail" in note for note in raised.value.__notes__)


def test_in_subprocess_accepts_huge_limits():
    assert in_subprocess(dict, memory_gb=1e300, seconds=1e300) == {}


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_check_limits_rejects_numbers_that_are_not_finite_and_positive(limit):
    check_limits(time_limit=1.0, repeats=1)
    with pytest.raises(UserError, match="--time-limit"):
        check_limits(repeats=1, time_limit=limit)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_signal_ends_the_command_and_its_children(number, status):
    command = [
        sys.executable,
        "-m",
        "transformer_vq",
        "bench",
        "train",
        *OPTIONS,
        "--kinds",
        "auto",
    ]
    process = subprocess.Popen(
        [*command, "--kinds", "auto", "--lengths", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Background jobs ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def children():
        task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return task.read_text().split() if task.exists() else []

    deadline = time.monotonic() + 60
    while len(children()) < 2 and time.monotonic() < deadline:  # one is the resource tracker
        time.sleep(0.05)
    started = children()
    assert started
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    try:
        _, error = process.communicate(timeout=60)  # ends when all children have closed the pipe
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == status
    if number == signal.SIGINT:  # after SIGTERM, a child that is starting may print an error
        assert error == "tvq: interrupted\n"
