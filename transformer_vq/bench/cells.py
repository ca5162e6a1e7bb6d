"""What every benchmark needs: a process of its own per measurement, and what machine it was."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from transformer_vq.device import keep_freed_memory
from transformer_vq.errors import UserError, is_out_of_memory

Measure = Callable[..., dict[str, Any]]

OUT_OF_MEMORY = "out of memory"
SECONDS_TO_END = 10
LONGEST_WAIT = 1e6  # seconds, 11 days; poll() rejects timeouts above 24 days


def in_subprocess(
    measure: Measure,
    *arguments: Any,
    memory_gb: float | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Call `measure` in a fresh process, so that its peak memory is its own.

    Returns what it returns, or {"failed": why} if it ran out of memory or time, or the process
    died; a ValueError or OSError is raised here. memory_gb: how much it may allocate on the host.
    seconds: how long it may take. Whatever ends this process ends the other one too.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, measure, arguments, memory_gb), daemon=True
    )
    resource_tracker.ensure_running()  # started with the process it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # inherits the mask: Ctrl-C is for the parent, which loses none by it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()
        if receiver.poll(None if seconds is None else min(seconds, LONGEST_WAIT)):
            result = receiver.recv()
            process.join(SECONDS_TO_END)  # a compiler has processes of its own to end
        else:
            assert seconds is not None
            result = {"failed": over_time(seconds)}
    except EOFError:
        process.join(SECONDS_TO_END)
        killed = process.exitcode == -signal.SIGKILL  # by the system, which has no memory left
        result = {"failed": OUT_OF_MEMORY if killed else f"exit status {process.exitcode}"}
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
    """Return why a measurement failed that took longer than its time limit."""
    return f"exceeded the time limit of {seconds:,.10g} s"


def check_limits(**limits: float) -> None:
    """Raise UserError unless all options, named as in Python, are finite and above 0."""
    for name, limit in limits.items():
        if not 0 < limit < math.inf:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {limit:g}: must be a finite number above 0")


def _child(
    sender: Connection, measure: Measure, arguments: tuple[Any, ...], memory_gb: float | None
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result: dict[str, Any] | ValueError | OSError
    keep_freed_memory()
    try:
        if memory_gb is not None:
            _limit_memory(memory_gb)
        result = measure(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            result = {"failed": OUT_OF_MEMORY}
        elif isinstance(error, ValueError | OSError):
            if not isinstance(error, UserError):  # a bug: show where it happened
                error.add_note(f"In the subprocess:\n{traceback.format_exc()}")
            result = error
        else:
            raise
    sender.send(result)


def _limit_memory(gigabytes: float) -> None:
    """Limit what this process may allocate; a lower limit that it already has is kept."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(min(gigabytes * 1e9, 2**62))  # setrlimit overflows above 2**63
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _end_with_parent() -> None:
    """A parent that is terminated cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def peak_bytes(device: torch.device | None = None) -> int:
    """The most memory this process has had: on the GPU if it works on one, else resident."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not getrusage, whose peak includes that of the process from which this one was forked.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def best_seconds(
    step: Callable[[], object],
    *,
    rounds: int,
    max_steps: int,
    seconds: float = 0.5,
    device: torch.device | None = None,
) -> float:
    """Seconds of one step: the best of some rounds after a warm-up of two steps.

    A round has as many steps as fit into `seconds`, but at least one and at most `max_steps`.
    """

    def time_steps(n: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(n):
            step()
        synchronize(device)
        return (time.perf_counter() - start) / n

    time_steps(1)
    n_steps = max(1, min(max_steps, int(seconds / time_steps(1))))
    return min(time_steps(n_steps) for _ in range(rounds))


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has done what it was told."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What the figures were measured on, with which versions and at which commit."""
    gpu = device is not None and device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if gpu else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_vq": _version(),
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version() -> str | None:
    try:
        return version("transformer-vq")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this package is run from; None if it was installed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
