"""Sampling rules: choose the next token from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Choose a token per row by inverting the cumulative distribution.

        logits: [b, vocab_size], uniform: [b] random numbers in [0, 1) -> tokens: [b].
        """
        if self.temperature < 1e-30:  # dividing by it would overflow
            return logits.argmax(-1)
        p, order = (logits / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = p.cumsum(-1) - p  # mass of the more likely tokens: the first one is always kept
        p = p.masked_fill(before >= self.top_p, 0.0)
        if self.top_k is not None:
            p[..., min(self.top_k, p.shape[-1]) :] = 0.0
        cumulative = p.cumsum(-1)
        drawn = (cumulative <= (uniform.to(p) * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
        return order.gather(-1, drawn.clamp(max=p.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
