"""Run functions in forked child processes, which may be killed, hang or run out of memory.

A new interpreter would spend seconds on importing torch. Forking is safe because tests use one
thread: children must not use the thread pools of their parent.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from transformer_vq.cli.main import COMMANDS

# Modules that commands import after parsing their arguments.
LIBRARY = (
    *("demo", "doctor"),
    *("data.corpus", "generation.text", "generation.snapshot", "generation.text"),
    *("hf.export", "serve.server", "training.evaluate", "training.run", "sizes"),
)


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status, or minus the signal number that killed it."""

    status: int
    out: str
    err: str
    timed_out: bool = False

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err


def run_forked(
    function: Callable[[], object], *, seconds: float = 60.0, memory_gb: float | None = None
) -> Ended:
    """Call `function` in a child; the exit status is 0, that of SystemExit, or 1 on error.

    memory_gb: limit for what the child allocates in addition to its parent.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _child(function, out.fileno(), err.fileno(), memory_gb)
        timed_out = not _wait(pid, seconds)
        if timed_out:
            os.kill(pid, signal.SIGKILL)
        _, how = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(os.waitstatus_to_exitcode(how), *texts, timed_out=timed_out)


def import_commands() -> None:
    """Import what the commands of `tvq` import, so that forked children need not."""
    for module, _ in COMMANDS.values():
        import_module(module)
    for name in LIBRARY:
        import_module(f"transformer_vq.{name}")


def _wait(pid: int, seconds: float) -> bool:
    """Wait for a child to end without reaping it; return False on timeout."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _data_bytes() -> int:
    """Return the size of the data segment, which a child inherits from its parent."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def _child(function: Callable[[], object], out: int, err: int, memory_gb: float | None) -> None:
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        # pytest has replaced them; the output of the child must go to the files.
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        if memory_gb is not None:
            limit = _data_bytes() + int(memory_gb * 1e9)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        function()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # skip the parent's cleanup
