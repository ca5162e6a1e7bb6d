"""Small worlds of gloo processes for tests; each is started once and runs many checks.

The processes connect through a file, so no ports are needed. Everything has a time limit, and all
processes are killed in the end. The first check that fails stops its world, because the remaining
ranks would wait for the failed one.
"""

import importlib
import json
import multiprocessing
import os
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

SECONDS = 900  # compiling takes a while on a busy machine
IMPORTED_ONCE = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformer_vq.training.run",
]


def run_checks(n_processes: int, module: str, names: list[str], folder: Path) -> dict[str, str]:
    """Run checks of a module in n processes; return tracebacks by name, empty if passed."""
    # Processes are forked from a server without threads, which imports torch only once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    processes = [
        context.Process(
            target=_run_rank, args=(rank, n_processes, module, names, folder), daemon=True
        )
        for rank in range(n_processes)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                time.sleep(1)  # let other ranks report their own failures
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    results = {}
    for name in names:
        reports = [folder / f"{name}-{rank}.json" for rank in range(n_processes)]
        found = [json.loads(path.read_text()) for path in reports if path.exists()]
        failure = "\n".join(text for text in found if text)
        if not failure and len(found) < n_processes:
            failure = "not finished: an earlier check failed, or the time limit was reached"
        results[name] = failure
    return results


def for_worlds(*sizes: int, slow: bool = True):
    """Mark a check with the world sizes it runs in, and whether it is one of the slow tests."""

    def mark(function):
        function.worlds, function.is_slow = sizes, slow
        return function

    return mark


def _run_rank(rank: int, n_processes: int, module: str, names: list[str], folder: Path) -> None:
    """Run all checks on one rank, and write a report for each."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=n_processes,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        torch.manual_seed(0)
        report = ""
        try:
            getattr(importlib.import_module(module), name)(folder)
        except BaseException:
            report = f"rank {rank} of {n_processes}:\n{traceback.format_exc()}"
        (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
        if report:
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
