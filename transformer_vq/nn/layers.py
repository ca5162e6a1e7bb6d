"""The small parts: RMSNorm, feed-forward, masks that last for a sequence, scaled sinusoids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.position import sinusoids

T = TypeVar("T")


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm without gain or bias over the last axis, in float32 or better."""
    return F.rms_norm(x.to(accumulation_dtype(x.dtype)), x.shape[-1:], eps=1e-6).to(x.dtype)


def linear(d_in: int, d_out: int, bias: bool = False) -> nn.Linear:
    """A projection with weights of variance 1 / d_in and, if any, a zero bias."""
    layer = nn.Linear(d_in, d_out, bias=bias)
    nn.init.normal_(layer.weight, std=d_in**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class FeedForward(nn.Module):
    """RMSNorm -> Linear -> ReLU^2 -> Linear, the other half of MQA and MHA layers."""

    def __init__(self, d_model: int, d_ff: int, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.in_proj = linear(d_model, d_ff)
        self.out_proj = linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, t, d_model] -> the residual branch, same shape."""
        return run(self._forward, x, recompute=self.recompute)

    def _forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(rms_norm(x))
        # A compiled graph decides on its own what to keep.
        x = F.relu(x).square() if torch.compiler.is_compiling() else _SquaredReLU.apply(x)
        return self.out_proj(x)


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2 that keeps x alone for its gradient: these are a model's widest activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.relu().mul_(grad).mul_(2)


class ScaledSinusoids(nn.Module):
    """Absolute sinusoids times a trainable scalar, which starts at zero."""

    def __init__(self, d_model: int, wavelength: float) -> None:
        super().__init__()
        self.d_model = d_model
        self.wavelength = wavelength
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [b, t] -> [b, t, d_model]."""
        return self.scale * sinusoids(positions, self.d_model, self.wavelength, self.scale.dtype)


def run(fn: Callable[..., T], *args: Any, recompute: bool) -> T:
    """fn(*args); with `recompute`, activations are not kept but computed again in backward."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(fn, *args, use_reentrant=False)
    return fn(*args)


def draw_keep(shape: tuple[int, ...], p_drop: float, device: torch.device) -> Tensor:
    """What dropout keeps: False with probability p_drop."""
    return torch.rand(shape, device=device) >= p_drop
