"""Tools for every benchmark: subprocesses with limits, timing, memory, and the machine record."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from transformer_vq.bench.records import Failure, Machine
from transformer_vq.device import cpu_name, keep_freed_memory
from transformer_vq.errors import UserError, is_out_of_memory

Result = TypeVar("Result")

OUT_OF_MEMORY = "out of memory"
SECONDS_TO_EXIT = 10
LONG = 10.0  # seconds; what takes longer is measured once
LONGEST_WAIT = 1e6  # seconds, 11 days; poll() rejects timeouts above 24 days


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a benchmark; `record` has the measurements so far."""

    def __init__(self, record: Any) -> None:
        super().__init__()
        self.record = record


def in_subprocess(
    measure: Callable[..., Result],
    *arguments: object,
    memory_gb: float | None = None,
    seconds: float | None = None,
) -> Result | Failure:
    """Call `measure` in a new process, so that its peak memory can be measured.

    memory_gb: limit on the host memory that the process may allocate. seconds: time limit.
    Returns the result of `measure`, or a `Failure` if the process ran out of memory or time, or
    died. A ValueError or OSError of `measure` is raised here. The subprocess ends with this
    process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, measure, arguments, memory_gb), daemon=True
    )
    # Start the tracker first: started together with the process, it would unblock SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    result: Result | Failure | ValueError | OSError
    try:
        process.start()  # inherits the mask, so that only the parent receives Ctrl-C
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()
        if receiver.poll(None if seconds is None else min(seconds, LONGEST_WAIT)):
            result = receiver.recv()
            process.join(SECONDS_TO_EXIT)  # torch.compile has worker processes to end
        else:
            assert seconds is not None
            result = Failure(failed=over_time(seconds))
    except EOFError:
        process.join(SECONDS_TO_EXIT)
        # The kernel kills processes when the machine is out of memory.
        killed = process.exitcode == -signal.SIGKILL
        result = Failure(failed=OUT_OF_MEMORY if killed else f"exit status {process.exitcode}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(result, ValueError | OSError):
        raise result
    return result


def over_time(seconds: float) -> str:
    """Return the failure message of a measurement that exceeded its time limit."""
    return f"exceeded the time limit of {seconds:,.10g} s"


def check_limits(**limits: float) -> None:
    """Raise UserError unless all options, named as in Python, are finite and above 0."""
    for name, limit in limits.items():
        if not 0 < limit < math.inf:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {limit:g}: must be a finite number above 0")


def _child(
    sender: Connection,
    measure: Callable[..., object],
    arguments: tuple[object, ...],
    memory_gb: float | None,
) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    result: object
    keep_freed_memory()
    try:
        if memory_gb is not None:
            limit_memory(memory_gb * 1e9)
        result = measure(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            result = Failure(failed=OUT_OF_MEMORY)
        elif isinstance(error, ValueError | OSError):
            if not isinstance(error, UserError):  # a bug: show where it happened
                error.add_note(f"In the subprocess:\n{traceback.format_exc()}")
            result = error
        else:
            raise
    sender.send(result)


def limit_memory(n_bytes: float) -> None:
    """Limit the memory that this process may allocate; an existing lower limit is kept."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(min(n_bytes, 2**62))  # setrlimit overflows above 2**63
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _exit_with_parent() -> None:
    """Wait for the parent to end, then exit: a parent that is killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def best_seconds(
    step: Callable[[], object],
    *,
    rounds: int,
    max_steps: int,
    seconds: float = 0.5,
    device: torch.device | None = None,
) -> float:
    """Return the seconds of one step: the best of several rounds, after two warm-up steps.

    A round has as many steps as fit into `seconds`, but at least one and at most `max_steps`.
    """
    seconds_per_call(step, 1, device)
    n_steps = max(1, min(max_steps, int(seconds / seconds_per_call(step, 1, device))))
    return min(seconds_per_call(step, n_steps, device) for _ in range(rounds))


def seconds_per_call(
    function: Callable[[], object], n: int, device: torch.device | None = None
) -> float:
    """Return the mean time of n calls."""
    synchronize(device)
    start = perf_counter()
    for _ in range(n):
        function()
    synchronize(device)
    return (perf_counter() - start) / n


def median_seconds(timed: Callable[[], float]) -> float:
    """Return the median time of three calls; one that takes long is not repeated.

    timed: does the work and returns the seconds that it took.
    """
    first = timed()
    if first > LONG:
        return first
    return median([first, *(timed() for _ in range(2))])


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has finished its queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | None = None) -> Machine:
    """Return the hardware, the versions and the commit of this measurement."""
    is_gpu = device is not None and device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if is_gpu else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_vq": _version(),
        "commit": _commit(),
    }


def _version() -> str | None:
    try:
        return version("transformer-vq")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout that contains this package; None if it was installed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
