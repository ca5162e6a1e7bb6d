"""Optimizers and learning rate schedule with the semantics of the paper's runs (Section C.2).

They differ from the PyTorch classes in two ways. `torch.optim.AdamW` multiplies the weight decay by
the learning rate; here the weight decay is constant. `torch.optim.Adafactor` caps the learning rate
at 1 / sqrt(t) and factors every matrix; here the schedule is not capped, and only dimensions of at
least 128 are factored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_vq.config import OptimConfig, RunConfig
from transformer_vq.training.adamw import AdamW
from transformer_vq.training.muon import Muon


def learning_rate(config: OptimConfig, step: int, n_steps: int) -> float:
    """Return the learning rate of one step: linear warm-up from zero, then the schedule.

    Cosine decays until the last step; wsd is constant until `decay_start`, then decays by
    1 - sqrt(share of the decay that is done), as in Hägele et al. (2024), "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations". Both end at `lr_final_share` of the
    peak. step: number of completed steps, 0 in the first one. n_steps: total number of steps.
    """
    if step < config.warmup:
        return config.lr * step / config.warmup
    start = config.decay_start(n_steps)
    done = min(max(step - start, 0) / max(n_steps - start, 1), 1.0)
    floor = config.lr * config.lr_final_share
    if config.schedule == "cosine":
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    return floor + (config.lr - floor) * (1 - math.sqrt(done)) if done else config.lr


def decay_start(config: RunConfig) -> int:
    """Return the number of steps before the learning rate of a run starts to decay."""
    return config.optim.decay_start(config.train.steps)


def make_optimizer(parameters: Mapping[str, Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a model's named parameters; vectors and scalars are not decayed."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim > 1}
    hidden: dict[str, Tensor] = {}
    if config.optimizer == "muon":
        hidden = {name: p for name, p in matrices.items() if _is_hidden(name)}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in matrices.items() if name not in hidden],
            "decay_per_step": config.weight_decay,
        },
        {"params": [p for p in trained.values() if p.ndim <= 1], "decay_per_step": 0.0},
        {
            "params": list(hidden.values()),
            "decay_per_step": config.weight_decay,
            "orthogonalize": True,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.lr, update_clip=config.update_clip)
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _is_hidden(name: str) -> bool:
    """Return whether a matrix connects hidden features; embeddings and the head do not."""
    return name.startswith("branches.")


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum, with updates relative to the RMS of a parameter.

    beta2 = 1 - t^-0.8. Second moments are factored into a row and a column if the two largest
    dimensions have at least `min_factored` elements.
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
            "decay_per_step": 0.0,
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
                    p.mul_(1 - group["decay_per_step"])
                    p.sub_(update * (group["lr"] * scale))
        return loss

    def _direction(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the normalized gradient of `p`, clipped to an RMS of `update_clip`.

        The gradient is divided by the root of its second moment, which is updated in `state`.
        """
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
            # The second moment is estimated by the outer product of the two over their mean.
            v_row, v_col = state["v_row"].unsqueeze(col), state["v_col"].unsqueeze(row)
            update = p.grad * (v_row / v_row.mean(row, keepdim=True)).rsqrt() * v_col.rsqrt()
        clipped: Tensor = update / (_rms(update) / group["update_clip"]).clamp(min=1)
        return clipped


def _factored_axes(p: Tensor, min_factored: int) -> tuple[int, int] | None:
    """Return the axes kept by the row and the column statistics; None if `p` is not factored.

    They are the second largest and the largest dimension.
    """
    if p.ndim < 2:
        return None
    *_, second, largest = sorted(range(p.ndim), key=lambda axis: p.shape[axis])
    return (second, largest) if p.shape[second] >= min_factored else None


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
