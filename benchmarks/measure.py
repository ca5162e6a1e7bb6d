"""Measurements that the benchmarks share.

Subprocesses with limits, timing, the machine record, and the references for the speed of a model:
matrix-product rates and read bandwidth. Measuring rates takes bounded time on any CPU, even if it
emulates a precision at a thousandth of the usual rate: a small product predicts the time of larger
ones, and shapes that would exceed the budget are skipped.
"""

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
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TypedDict, TypeVar, final

import torch

from transformer_vq.device import cpu_name, has_fast_bf16, keep_freed_memory, total_memory
from transformer_vq.errors import UserError, is_out_of_memory

Result = TypeVar("Result")

OUT_OF_MEMORY = "out of memory"
SECONDS_TO_EXIT = 10
LONGEST_WAIT = 1e6  # seconds, 11 days; poll() rejects timeouts above 24 days

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROBE = (256, 256, 256)
# (m, k, n): square matrices, and tokens times typical layer widths
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 4096), (8192, 768, 3072))
ACCELERATOR_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (32_768, 2048, 8192))
BANDWIDTH_ROWS, BANDWIDTH_COLUMNS = 16_384, 4096  # 268 MB, more than any cache
SECONDS = 0.1  # minimum duration of one timing
BUDGET = 8.0  # seconds per precision
TIME_LIMIT = 120.0  # seconds for the measuring subprocess, including its start


@final
class Failure(TypedDict):
    """A measurement that ran out of memory or time, or whose subprocess died."""

    failed: str


class Machine(TypedDict):
    """The hardware, the versions and the commit of a measurement."""

    processor: str
    cores: int | None
    threads: int
    memory_gb: float
    python: str
    torch: str
    transformer_vq: str | None
    commit: str | None


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
        result = Failure(failed=_death(process.exitcode or 0))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if isinstance(result, ValueError | OSError):
        raise result
    return result


def _death(status: int) -> str:
    """Return why a process ended without a result."""
    if status == -signal.SIGKILL:
        return OUT_OF_MEMORY  # the kernel kills processes when the machine is out of memory
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def over_time(seconds: float) -> str:
    """Return the failure message of a measurement that exceeded its time limit."""
    return f"exceeded the time limit of {seconds:,.10g} s"


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


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has finished its queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Return the memory of the device that can be allocated, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        status = Path("/proc/meminfo").read_text()
        return int(status.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return total_memory(device)


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


def precisions_to_measure(device: torch.device, used: Sequence[str]) -> list[str]:
    """Return fp32, the precisions in use, and bf16 if the device has instructions for it."""
    wanted = {"fp32", *used} | ({"bf16"} if has_fast_bf16(device) else set())
    return [name for name in DTYPES if name in wanted]


def matmul_rates(
    device: torch.device, precisions: Sequence[str], repeats: int = 3
) -> dict[str, float]:
    """Return the FLOPs per second of the fastest shape, by precision."""
    shapes = SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES
    return {name: _best_rate(device, DTYPES[name], shapes, repeats) for name in precisions}


def bandwidth_probe(device: torch.device, repeats: int = 5) -> Callable[[], float]:
    """Return a function that measures the read bandwidth in bytes per second.

    It is what a large matrix-vector product reads, the best of several.
    """
    matrix = torch.ones(BANDWIDTH_ROWS, BANDWIDTH_COLUMNS, device=device)
    vector = torch.ones(BANDWIDTH_COLUMNS, device=device)

    def measure() -> float:
        product = partial(torch.mv, matrix, vector)
        seconds = [seconds_per_call(product, 1, device) for _ in range(1 + repeats)]
        return matrix.nbytes / min(seconds[1:])  # the first is a warm-up

    return measure


def _best_rate(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], repeats: int
) -> float:
    """Return the best rate of the probe and of the shapes that fit into the budget."""
    deadline = perf_counter() + BUDGET
    best = _rate(device, dtype, PROBE, 1, deadline)
    # Small shapes first: the rate of the probe may be far below the peak rate.
    for shape in sorted(shapes, key=math.prod):
        seconds = 2 * math.prod(shape) / best
        predicted = 2 * seconds + repeats * (SECONDS + seconds)
        if perf_counter() + predicted <= deadline:
            best = max(best, _rate(device, dtype, shape, repeats, deadline))
    return best


def _rate(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    repeats: int,
    deadline: float,
) -> float:
    """Return the best rate of several timings; start none after the deadline."""
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)

    def seconds(n_products: int) -> float:
        return seconds_per_call(lambda: torch.mm(a, b), n_products, device)

    # A warm-up, then a single product, which determines how many products a timing needs.
    timings = [seconds(1)]
    n_products = 1
    while len(timings) < 2 + repeats and perf_counter() < deadline:
        timings.append(seconds(n_products))
        n_products = math.ceil(SECONDS / timings[1])
    return 2 * m * k * n / min(timings[2:] or timings)


def process_bytes(field: str, process: int | str = "self") -> int:
    """Return a size in /proc/PID/status, such as VmHWM, the peak resident memory; Linux only."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024
