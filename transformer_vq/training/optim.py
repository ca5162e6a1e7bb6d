"""Optimizers and learning rate schedule with the semantics of the paper's runs (Section C.2).

`torch.optim.AdamW` multiplies the weight decay by the learning rate; here the weight decay is
constant. `torch.optim.Adafactor` caps the learning rate at 1 / sqrt(t) and factors every matrix;
here the schedule is not capped, and only dimensions of at least 128 are factored.
`torch.optim.Muon` orthogonalizes in bf16, which most CPUs emulate, and which rounds differently on
every mesh; here the precision is that of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_vq.config import OptimConfig
from transformer_vq.parallel.shards import Shard, is_sharded


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


def make_optimizer(parameters: Mapping[str, Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a model's named parameters; vectors and scalars are not decayed."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim > 1}
    # Matrices that connect hidden features; embeddings and the head do not.
    hidden = [p for name, p in matrices.items() if name.startswith("branches.")]
    others = [p for name, p in matrices.items() if not name.startswith("branches.")]
    if config.optimizer != "muon":
        hidden, others = [], list(matrices.values())
    vectors = [p for p in trained.values() if p.ndim <= 1]
    decay = config.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": others, "decay_per_step": decay},
        {"params": vectors, "decay_per_step": 0.0},
        {"params": hidden, "decay_per_step": decay, "orthogonalize": True},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return Adafactor(groups, lr=config.lr, update_clip=config.update_clip)
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)


class AdamW(torch.optim.AdamW):
    """AdamW whose weight decay does not depend on the learning rate.

    Every step multiplies the weights of a parameter group by 1 - `decay_per_step`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            if group["decay_per_step"] and with_grad:
                torch._foreach_mul_(with_grad, 1 - group["decay_per_step"])
        loss: float | None = super().step(closure)
        return loss


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for parameter groups with `orthogonalize`, AdamW for the others.

    Matrices are updated by the nearest semi-orthogonal matrix of their momentum. Updates are scaled
    to the size of AdamW's, as in Liu et al. (2025), "Muon is Scalable for LLM Training", so one
    learning rate and schedule serve both.
    """

    momentum = 0.95
    adamw_rms = 0.2  # typical root mean square of an AdamW update, per unit of learning rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        held: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for p in group["params"] if group.get("orthogonalize") else ():
                if p.grad is not None:
                    held.append((p, p.grad))
                    self._update(p, p.grad, group)
                    p.grad = None  # AdamW skips it
        super().step()
        for p, grad in held:
            p.grad = grad
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:  # AdamW's load_state_dict expects a number of steps
            state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(p)}
        state["step"] += 1
        momentum: Tensor = state["momentum"]
        momentum.lerp_(grad, 1 - self.momentum)
        shard, update = Shard(p), torch.lerp(grad, momentum, self.momentum)  # Nesterov
        # One message per matrix; the iteration itself would need several.
        update = orthogonalize(update.full_tensor() if is_sharded(update) else update)
        shard.local.mul_(1 - group["decay_per_step"])
        size = group["lr"] * self.adamw_rms * max(p.shape) ** 0.5
        shard.local.sub_(update[shard.slices], alpha=size)


def orthogonalize(x: Tensor) -> Tensor:
    """Return approximately U V^T of the singular value decomposition U S V^T. x: [m, n].

    Singular values end between about 0.7 and 1.2: the coefficients of the quintic iteration are
    chosen for a steep slope at zero.
    """
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-30)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ wide
    result: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return result


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum, with updates relative to the RMS of a parameter.

    beta2 = 1 - t^-0.8. Second moments are factored into a row and a column if the two largest
    dimensions have at least `min_factored` elements.
    """

    min_factored = 128
    min_scale = 1e-3

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, *, update_clip: float = 1.0
    ) -> None:
        defaults = {"lr": lr, "update_clip": update_clip, "decay_per_step": 0.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        found = [(p, group) for group in self.param_groups for p in group["params"]]
        found = [(p, group) for p, group in found if p.grad is not None]
        # Sharded parameters all at once, in two messages; others one at a time, in less memory.
        for batch in [found] if any(is_sharded(p) for p, _ in found) else [[x] for x in found]:
            self._update(batch)
        return loss

    def _update(self, parameters: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update parameters, each given with its group."""
        wanted: list[tuple[Shard, Tensor, int | None]] = []
        for p, _ in parameters:
            shard, squared = Shard(p), Shard(p.grad).local.square() + 1e-30
            wanted.append((shard, shard.local.square(), None))
            wanted += [(shard, squared, axis) for axis in reversed(self._factored_axes(p))]
        found = iter(means(wanted))
        scales, updates = [], []
        for p, _ in parameters:
            scales.append(next(found).sqrt().clamp(min=self.min_scale))
            updates.append((Shard(p), self._direction(p, found)))
        sizes = means([(shard, update.square(), None) for shard, update in updates])
        for (_, group), (shard, update), size, scale in zip(
            parameters, updates, sizes, scales, strict=True
        ):
            clipped = update / (size.sqrt() / group["update_clip"]).clamp(min=1)
            shard.local.mul_(1 - group["decay_per_step"])
            shard.local.sub_(clipped * (group["lr"] * scale))

    def _direction(self, p: Tensor, factors: Iterator[Tensor]) -> Tensor:
        """Return the gradient divided by the root of its second moment, which is updated.

        factors: means of the squared gradient over the columns and over the rows, if p is factored.
        """
        state, grad, axes = self.state[p], Shard(p.grad).local, self._factored_axes(p)
        state["step"] = state.get("step", 0) + 1
        beta2 = 1 - state["step"] ** -0.8
        if not axes:
            if "v" not in state:
                state["v"] = torch.zeros_like(p)
            v = Shard(state["v"]).local
            v.lerp_(grad.square() + 1e-30, 1 - beta2)
            return grad * v.rsqrt()
        for name in ("v_row", "v_col"):
            factor = next(factors)
            if name not in state:
                state[name] = torch.zeros_like(factor)
            state[name].lerp_(factor, 1 - beta2)
        # The second moment is estimated by the outer product of the two over their mean.
        (row, col), slices = axes, Shard(p).slices
        v_row, v_col = state["v_row"].unsqueeze(col), state["v_col"].unsqueeze(row)
        by_row = (v_row / v_row.mean(row, keepdim=True)).rsqrt()
        by_col = v_col.rsqrt()
        update: Tensor = grad * by_row.expand(p.shape)[slices] * by_col.expand(p.shape)[slices]
        return update

    def _factored_axes(self, p: Tensor) -> tuple[int, ...]:
        """Return the axes kept by the row and the column statistics; empty if p is not factored.

        They are the second largest and the largest dimension.
        """
        axes = sorted(range(p.ndim), key=lambda axis: p.shape[axis])[-2:]
        return tuple(axes) if len(axes) == 2 and p.shape[axes[0]] >= self.min_factored else ()


def means(wanted: list[tuple[Shard, Tensor, int | None]]) -> list[Tensor]:
    """Return the mean of each tensor over one axis, or over all; one all-reduce for all of them.

    wanted: a shard, values for its elements, and the axis.
    """
    if all(shard.local.shape == shard.shape and shard.n_copies == 1 for shard, _, _ in wanted):
        return [x.mean() if axis is None else x.mean(axis) for _, x, axis in wanted]
    found = []
    for shard, x, axis in wanted:
        kept = [i for i in range(x.ndim) if axis not in (None, i)]
        n = shard.shape.numel() if axis is None else shard.shape[axis]
        total = x.sum() if axis is None else x.sum(axis)
        mean = x.new_zeros([shard.shape[i] for i in kept])
        mean[tuple(shard.slices[i] for i in kept)] = total / (n * shard.n_copies)
        found.append(mean)
    flat = torch.cat([x.flatten() for x in found])
    dist.all_reduce(flat)
    parts = flat.split([x.numel() for x in found])
    return [part.view_as(x) for part, x in zip(parts, found, strict=True)]
