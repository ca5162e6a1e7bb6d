"""Losses that are checked later: reading them after every step would make the host wait."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from transformer_vq.nn.quantizer import NotFiniteError


class NotFiniteStepError(NotFiniteError):
    """A training step with NaN or inf. step: its number, from 1."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class StepLosses:
    """Nats per token, commitment loss and gradient norm of a step, [3] on the device.

    step: number of the step, from 1.
    """

    def __init__(self, step: int, tensor: Tensor) -> None:
        self.step = step
        self.tensor = tensor

    @cached_property
    def values(self) -> list[float]:
        """The losses as numbers; the first use waits for a GPU."""
        values: list[float] = self.tensor.tolist()
        return values

    def check(self) -> None:
        """Raise NotFiniteStepError if a number is not finite."""
        nats, _, grad_norm = self.values
        if not math.isfinite(sum(self.values)):
            raise NotFiniteStepError(self.step, f"loss {nats}, gradient norm {grad_norm}")


def check_losses(losses: list[StepLosses]) -> None:
    """Check several steps, the first one first, with a single copy from the device."""
    if not losses:
        return
    rows = torch.stack([x.tensor for x in losses]).tolist()
    for of_step, values in zip(losses, rows, strict=True):
        of_step.values = values
        of_step.check()
