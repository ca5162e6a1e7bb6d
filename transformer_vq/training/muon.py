"""Muon: momentum whose matrices are orthogonalized (Jordan et al., 2024).

Hidden matrices are updated by the nearest semi-orthogonal matrix of their momentum; embeddings, the
output head, vectors and scalars by AdamW. Updates are scaled to the size of AdamW's, as in Liu et
al. (2025), "Muon is Scalable for LLM Training", so one learning rate and schedule serve both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_vq.training.adamw import AdamW

MOMENTUM = 0.95
ADAMW_RMS = 0.2  # typical root mean square of an AdamW update, per unit of learning rate
# Coefficients of the quintic iteration, chosen for a steep slope at zero: singular values end
# between about 0.7 and 1.2, which is close enough to one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(AdamW):
    """Muon for parameter groups with `orthogonalize`, AdamW for the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        held: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            if not group.get("orthogonalize"):
                continue
            for p in group["params"]:
                if p.grad is not None:
                    held.append((p, p.grad))
                    self._update(p, p.grad, self.state[p], group)
                    p.grad = None  # AdamW skips it
        super().step()
        for p, grad in held:
            p.grad = grad
        return loss

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:  # AdamW's load_state_dict expects a number of steps
            state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(p)}
        state["step"] += 1
        momentum: Tensor = state["momentum"]
        momentum.lerp_(grad, 1 - MOMENTUM)
        update = orthogonalize(torch.lerp(grad, momentum, MOMENTUM))  # Nesterov
        p.mul_(1 - group["decay_per_step"])
        p.sub_(update, alpha=group["lr"] * ADAMW_RMS * max(p.shape) ** 0.5)


def orthogonalize(x: Tensor) -> Tensor:
    """Return approximately U V^T of the singular value decomposition U S V^T. x: [m, n]."""
    a, b, c = _QUINTIC
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-30)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    result: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return result
