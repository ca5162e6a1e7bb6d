"""Optimizers and learning rate with the semantics of the paper's runs.

Two traps of the stock classes are avoided. `torch.optim.AdamW` multiplies the weight decay by the
learning rate; here every update takes the same share of a weight, whatever the schedule says.
`torch.optim.Adafactor` caps its step at 1 / sqrt(t) and factors every matrix; here the schedule
alone sets the step, and only dimensions of at least 128 are factored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from transformer_vq.config import OptimConfig


def learning_rate(config: OptimConfig, update: int, n_updates: int) -> float:
    """Linear warm-up from zero, then a cosine down to `lr_final_share` of the peak.

    update: how many updates came before, 0 for the first one.
    """
    if update < config.warmup:
        return config.lr * update / config.warmup
    done = min((update - config.warmup) / max(n_updates - config.warmup, 1), 1.0)
    floor = config.lr * config.lr_final_share
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """One group with weight decay, one without: vectors and scalars are never decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "decay_per_update": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "decay_per_update": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return Adafactor(groups, lr=config.lr, update_clip=config.update_clip)


class AdamW(torch.optim.AdamW):
    """Adam whose weight decay, `decay_per_update` of a group, does not follow the learning rate."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        _decay(self.param_groups)
        return super().step(closure)


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum: steps relative to the size of a parameter, clipped by RMS.

    beta2 = 1 - t^-0.8; second moments are kept as a row and a column when both of the two largest
    dimensions reach `min_factored`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        update_clip: float = 1.0,
        decay_exponent: float = 0.8,
        min_factored: int = 128,
        min_scale: float = 1e-3,
        eps: float = 1e-30,
    ) -> None:
        defaults = {
            "lr": lr,
            "update_clip": update_clip,
            "decay_exponent": decay_exponent,
            "min_factored": min_factored,
            "min_scale": min_scale,
            "eps": eps,
            "decay_per_update": 0.0,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._direction(p, self.state[p], group)
                    scale = _rms(p).clamp(min=group["min_scale"])
                    p.mul_(1 - group["decay_per_update"])
                    p.sub_(update * (group["lr"] * scale))
        return loss

    def _direction(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The gradient over the root of its second moment, clipped to an RMS of `update_clip`."""
        squared = p.grad.square() + group["eps"]  # type: ignore[union-attr]
        axes = _factored_axes(p, group["min_factored"])
        if not state:
            state["step"] = 0
            if axes is None:
                state["v"] = torch.zeros_like(p)
            else:
                state["v_row"] = torch.zeros_like(squared.mean(axes[1]))
                state["v_col"] = torch.zeros_like(squared.mean(axes[0]))
        state["step"] += 1
        beta2 = 1 - state["step"] ** -group["decay_exponent"]
        if axes is None:
            state["v"].lerp_(squared, 1 - beta2)
            update = p.grad * state["v"].rsqrt()
        else:
            row, col = axes
            state["v_row"].lerp_(squared.mean(col), 1 - beta2)
            state["v_col"].lerp_(squared.mean(row), 1 - beta2)
            # v is estimated by the outer product of the two over their common mean
            v_row, v_col = state["v_row"].unsqueeze(col), state["v_col"].unsqueeze(row)
            update = p.grad * (v_row / v_row.mean(row, keepdim=True)).rsqrt() * v_col.rsqrt()
        return update / (_rms(update) / group["update_clip"]).clamp(min=1)


def _factored_axes(p: Tensor, min_factored: int) -> tuple[int, int] | None:
    """The axes kept by the row and by the column statistics: second largest and largest."""
    if p.ndim < 2:
        return None
    *_, second, largest = sorted(range(p.ndim), key=lambda axis: p.shape[axis])
    return (second, largest) if p.shape[second] >= min_factored else None


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _decay(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        if group["decay_per_update"]:
            with_grad = [p for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(with_grad, 1 - group["decay_per_update"])
