"""Copies between the host and a GPU that do not make the host wait.

A host that waits for the GPU cannot queue its next kernels, and the GPU runs dry. An ordinary copy
waits until all queued work is done; a copy from or to pinned memory only joins the queue. On other
devices these functions are plain copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PINNED = {"cuda"}
"""Types of devices that copy from and to pinned memory."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device; a copy to a GPU is only queued."""
    if x.device.type != "cpu" or device.type not in PINNED:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor on the host, queued when it is created and complete when it is read."""

    def __init__(self, x: Tensor) -> None:
        self._copy, self._done = x.detach(), None
        if x.device.type in PINNED:
            pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy = pinned.copy_(self._copy, non_blocking=True)
            self._done = torch.Event(x.device)
            self._done.record()

    def tolist(self) -> Any:
        """Return the values as numbers in nested lists; waits for this copy, not for later work."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
