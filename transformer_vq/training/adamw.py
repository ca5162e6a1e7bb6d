"""AdamW with the weight decay of the paper's runs (Section C.2).

`torch.optim.AdamW` multiplies the weight decay by the learning rate; here it is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """AdamW whose weight decay does not depend on the learning rate.

    Every step multiplies the weights of a parameter group by 1 - `decay_per_step`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        _decay(self.param_groups)
        loss: float | None = super().step(closure)
        return loss


def _decay(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        if group["decay_per_step"] and with_grad:
            torch._foreach_mul_(with_grad, 1 - group["decay_per_step"])
