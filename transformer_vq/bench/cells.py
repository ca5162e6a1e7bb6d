"""What every benchmark needs: a process of its own per measurement, and what machine it was."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from transformer_vq.nn.device import keep_freed_memory

Measure = Callable[..., dict[str, Any]]

OUT_OF_MEMORY = "out of memory"
SECONDS_TO_END = 10
SYMPTOMS = ("allocate memory", "bad_alloc", "memory object")  # torch's, the system's, oneDNN's


def alone(
    measure: Measure,
    *arguments: Any,
    memory_gb: float | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Call `measure` in a fresh process, so that its peak memory is its own.

    Returns what it returns, or {"failed": why} if memory did not suffice or the process died;
    mistakes (ValueError) are raised here. memory_gb: how much it may allocate on the host.
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
        if receiver.poll(seconds):
            result = receiver.recv()
            process.join(SECONDS_TO_END)  # a compiler has processes of its own to end
        else:
            result = {"failed": f"ended after {seconds:,.0f} s"}
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGKILL  # by the system, which has no memory left
        result = {"failed": OUT_OF_MEMORY if killed else f"exit status {process.exitcode}"}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(result, ValueError):
        raise result
    return result


def _child(
    sender: Connection, measure: Measure, arguments: tuple[Any, ...], memory_gb: float | None
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result: dict[str, Any] | ValueError
    keep_freed_memory()
    try:
        if memory_gb is not None:
            limit = int(memory_gb * 1e9)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        result = measure(*arguments)
    except ValueError as error:
        result = error
    except (MemoryError, torch.OutOfMemoryError):
        result = {"failed": OUT_OF_MEMORY}
    except RuntimeError as error:
        if not any(symptom in str(error) for symptom in SYMPTOMS):
            raise
        result = {"failed": OUT_OF_MEMORY}
    sender.send(result)


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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
