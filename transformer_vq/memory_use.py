"""How much memory a process or a GPU has used."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the peak memory of this process: on `device` if it is a GPU, else resident memory."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # getrusage would include the peak of the process from which this one was forked.
        return _status_bytes("VmHWM")
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def peak_bytes_of(pid: int) -> int | None:
    """Return the peak resident memory of another process; None if the system does not tell."""
    try:
        return _status_bytes("VmHWM", pid)
    except (OSError, IndexError):
        return None


def allocated_bytes() -> int:
    """Return the memory that this process has allocated, resident or not; Linux only."""
    return _status_bytes("VmData")


def _status_bytes(field: str, process: int | str = "self") -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024
