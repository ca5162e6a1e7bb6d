"""Sampling rules: choose the next token from its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_vq.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and nucleus (top-p) sampling."""

    temperature: float = 1.0
    """Softmax temperature; 0 always chooses the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: must be a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be at least 1, or None")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen; dividing by less would overflow."""
        return self.temperature < 1e-30

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Choose a token per row by inverting the cumulative distribution.

        logits: [b, vocab_size], uniform: [b] random numbers in [0, 1) -> tokens: [b].
        """
        return choose([self], logits, uniform)


def choose(rules: Sequence[Sampling], logits: Tensor, uniform: Tensor) -> Tensor:
    """Choose a token per row as `Sampling.choose` does, with one rule per row or one for all."""
    if all(rule.is_greedy for rule in rules):
        return logits.argmax(-1)

    def column(values: Sequence[float], dtype: torch.dtype = logits.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(-1)

    n = logits.shape[-1]
    temperature = column([1.0 if rule.is_greedy else rule.temperature for rule in rules])
    p, order = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    before = p.cumsum(-1) - p  # mass of the more likely tokens: the first one is always kept
    p = p.masked_fill(before >= column([rule.top_p for rule in rules]), 0.0)
    # A greedy row keeps only the most likely token.
    kept = [1 if rule.is_greedy else min(rule.top_k or n, n) for rule in rules]
    if min(kept) < n:
        ranks = torch.arange(n, device=logits.device)
        p = p.masked_fill(ranks >= column(kept, torch.int64), 0.0)
    cumulative = p.cumsum(-1)
    drawn = (cumulative <= (uniform.to(p) * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
    return order.gather(-1, drawn.clamp(max=n - 1).unsqueeze(-1)).squeeze(-1)
