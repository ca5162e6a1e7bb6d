"""Checks of values that do not wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ASSERTING = {"cuda"}
"""Types of devices whose kernels can make a check."""


def is_readable(x: Tensor) -> bool:
    """Return whether reading values of x is free.

    Not on a GPU, where it would stall the host, nor while compiling, where it would break the
    graph.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_values(ok: Tensor, summary: str, error: Callable[[], Exception]) -> None:
    """Raise error() unless `ok` is True everywhere; on a CUDA device, check later.

    There a kernel makes the check when the GPU reaches it: it prints `summary`, and the next call
    that waits for the GPU fails. Compiled graphs and other devices do not check.
    """
    if is_readable(ok):
        if not ok.all():
            raise error()
    elif ok.device.type in ASSERTING and not torch.compiler.is_compiling():
        torch._assert_async(ok.all(), summary)
