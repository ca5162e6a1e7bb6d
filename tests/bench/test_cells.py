"""A measurement in a process of its own: limits of memory and time, and what ends it early."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_vq.bench.cells import alone
from transformer_vq.bench.steps import Cell, timed_steps

SMALL = {"d_model": 16, "d_k": 8, "n_code": 7, "block_len": 4, "device": "cpu"}
OPTIONS = [x for k, v in SMALL.items() for x in ("--" + k.replace("_", "-"), str(v))]


def test_a_cell_over_the_limit_of_memory_is_out_of_memory():
    cell = Cell("shga", "full", "auto", 16_384, **SMALL)
    assert alone(timed_steps, cell, memory_gb=1.0) == {"failed": "out of memory"}


def test_a_process_that_takes_too_long_is_ended():
    assert alone(time.sleep, 600, seconds=0.1) == {"failed": "ended after 0 s"}


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
