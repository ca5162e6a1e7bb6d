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
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
