"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from transformer_vq.parallel.strategy import ParallelStrategy

PREFIX = "average/"


class WeightAverage:
    """The average of all parameters of a run, sharded like them. Codebooks are not included.

    Codebooks are running averages already, so an averaged model uses the current ones.
    decay: share of the average that a step keeps. In early steps it is smaller, so that the initial
    weights are soon forgotten.
    """

    def __init__(self, strategy: ParallelStrategy, decay: float) -> None:
        self.strategy = strategy
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in strategy.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the current weights. step: number of earlier updates."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = list(self.weights.values())
        weights = [p.detach() for p in self.strategy.parameters.values()]
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, weights, alpha=1 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange the weights of the model with their average during the body."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.strategy.parameters.items():
            current = p.detach().clone()
            p.copy_(self.weights[name])
            self.weights[name].copy_(current)
        self.strategy.release_gathered()

    def tensors(self) -> dict[str, Tensor]:
        """Return full tensors for a checkpoint; all ranks must call this together."""
        gather = self.strategy.gather
        return {f"{PREFIX}{name}": gather(x) for name, x in self.weights.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned, on any mesh."""
        for name, p in self.strategy.parameters.items():
            self.weights[name] = self.strategy.shard_like(tensors[f"{PREFIX}{name}"], p)
