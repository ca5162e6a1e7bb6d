"""A measurement in a process of its own: limits of memory and time, and what ends it early."""

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


def test_a_cell_over_the_limit_of_memory_is_out_of_memory():
    cell = Cell("shga", "full", "auto", 16_384, **SMALL)
    assert in_subprocess(timed_steps, cell, memory_gb=1.0) == {"failed": "out of memory"}


def test_a_process_that_takes_too_long_is_ended():
    assert in_subprocess(time.sleep, 600, seconds=0.1) == {
        "failed": "exceeded the time limit of 0.1 s"
    }


def test_the_time_limit_is_reported_as_it_was_given():
    assert over_time(1500.0) == "exceeded the time limit of 1,500 s"
    assert over_time(0.25) == "exceeded the time limit of 0.25 s"


def fail(how: str) -> None:
    raise {
        "extra": missing_extra("gpt2", "transformers", "hf"),
        "file": FileNotFoundError(2, "No such file", "data.txt"),
        "bug": ValueError("a bug"),
    }[how]


@pytest.mark.parametrize(
    ("how", "kind"),
    [("extra", MissingExtraError), ("file", FileNotFoundError)],
)
def test_an_error_of_the_user_is_raised_by_the_parent(how, kind):
    with pytest.raises(kind) as here:
        fail(how)
    with pytest.raises(kind) as raised:
        in_subprocess(fail, how)
    assert type(raised.value) is kind
    assert str(raised.value) == str(here.value)


def test_a_bug_in_the_subprocess_shows_where_it_happened():
    with pytest.raises(ValueError, match="a bug") as raised:
        in_subprocess(fail, "bug")
    assert not isinstance(raised.value, UserError)
    assert any("in fail" in note for note in raised.value.__notes__)


def test_limits_may_be_any_finite_number():
    assert in_subprocess(dict, memory_gb=1e300, seconds=1e300) == {}


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_limits_are_finite_and_above_zero(limit):
    check_limits(time_limit=1.0, repeats=1)
    with pytest.raises(UserError, match="--time-limit"):
        check_limits(repeats=1, time_limit=limit)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_ends_the_command_and_its_children(number, status):
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
        # Where tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def children():
        task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return task.read_text().split() if task.exists() else []

    deadline = time.monotonic() + 60
    while len(children()) < 2 and time.monotonic() < deadline:  # one of them keeps resources
        time.sleep(0.05)
    started = children()
    assert started
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    try:
        _, error = process.communicate(timeout=60)  # ends when no child holds the pipe
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == status
    if number == signal.SIGINT:  # a child whose parent is gone before it began may say so
        assert error == "tvq: interrupted\n"
