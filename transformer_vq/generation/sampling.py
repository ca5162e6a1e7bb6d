"""Sampling rules: choose the next token from its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_vq.device import to_device
from transformer_vq.errors import UserError

NOT_FINITE = -1  # what `mark_not_finite` puts in the place of a token


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

    def override(
        self, temperature: float | None, top_p: float | None, top_k: int | None
    ) -> Sampling:
        """Return these rules with the values that are not None."""
        given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        return replace(self, **{name: x for name, x in given.items() if x is not None})

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen; dividing by less would overflow."""
        return self.temperature < 1e-30

    @property
    def is_restricted(self) -> bool:
        """Whether only the most likely tokens may be chosen."""
        return self.top_p < 1 or self.top_k is not None

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Choose a token per row by inverting the cumulative distribution.

        logits: [b, vocab_size], uniform: [b] random numbers in [0, 1) -> tokens: [b].
        """
        return choose([self], logits, uniform)


def choose(rules: Sequence[Sampling], logits: Tensor, uniform: Tensor) -> Tensor:
    """Choose a token per row as `Sampling.choose` does, with one rule per row or one for all."""
    if all(rule.is_greedy for rule in rules):
        return logits.argmax(-1)
    temperature = _per_row([1.0 if rule.is_greedy else rule.temperature for rule in rules], logits)
    p, uniform = (logits / temperature).softmax(-1), uniform.to(logits.dtype)
    is_restricted = [rule.is_restricted for rule in rules]
    if not any(is_restricted):
        tokens = _draw(p, uniform)
    else:
        kept, order = _most_likely(p, rules)
        tokens = order.gather(-1, _draw(kept, uniform).unsqueeze(-1)).squeeze(-1)
        if not all(is_restricted):
            rows = to_device(torch.tensor(is_restricted), p.device)
            tokens = torch.where(rows, tokens, _draw(p, uniform))
    if any(rule.is_greedy for rule in rules):
        rows = to_device(torch.tensor([rule.is_greedy for rule in rules]), p.device)
        tokens = torch.where(rows, logits.argmax(-1), tokens)
    return tokens


def mark_not_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return the tokens with NOT_FINITE for rows whose logits contain NaN or infinity.

    Excluded tokens may have logits of minus infinity. The decoder needs the tokens without marks,
    which are valid for every row. tokens: [b], logits: [b, vocab_size] -> [b].
    """
    return tokens.masked_fill(~logits.amax(-1).isfinite(), NOT_FINITE)


def _draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution. p: [b, n], not normalized, uniform: [b] -> [b]."""
    cumulative = p.cumsum(-1)
    total = cumulative[..., -1]
    # Below the total, also if a number close to 1 was rounded: the last tokens may have p = 0.
    target = (uniform * total).minimum(total.nextafter(torch.zeros_like(total)))
    return (cumulative <= target.unsqueeze(-1)).sum(-1)


def _most_likely(p: Tensor, rules: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Return the tokens in descending order, and their probabilities, 0 for excluded ones.

    p: [b, n] -> [b, n] each. Of equally likely tokens, those with lower ids come first.
    """
    n = p.shape[-1]
    p, order = _sort(p)
    before = p.cumsum(-1) - p  # mass of the more likely tokens
    excluded = before >= _per_row([rule.top_p for rule in rules], p)
    excluded[:, 0] = False  # even if top_p is rounded to 0
    kept = [min(rule.top_k or n, n) for rule in rules]
    if min(kept) < n:
        excluded |= torch.arange(n, device=p.device) >= _per_row(kept, p)
    return p.masked_fill(excluded, 0.0), order


def _sort(p: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row of positive numbers in descending order, stably."""
    if p.device.type != "cpu" or p.dtype != torch.float32 or torch.compiler.is_compiling():
        values, order = p.sort(descending=True, stable=True)
        return values, order
    # NumPy sorts integers with vector instructions, several times as fast as torch; for a large
    # vocabulary the sort would take longer than the model. The bits of positive floats are in
    # their order; the index in the lower half makes it stable.
    largest = torch.iinfo(torch.int32).max
    key = ((largest - p.view(torch.int32).long()) << 32) | torch.arange(p.shape[-1])
    order = torch.from_numpy(np.sort(key.numpy(), axis=-1)) & largest
    return p.gather(-1, order), order


def _per_row(values: Sequence[float], like: Tensor) -> Tensor | float:
    """Return one value per row, [b, 1], or a number if all are equal, which need not be copied."""
    if len(set(values)) == 1:
        return values[0]
    return to_device(torch.tensor(values, dtype=like.dtype), like.device).unsqueeze(-1)
