"""Building blocks: RMSNorm, gates, feed-forward, dropout masks and scaled sinusoids."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.position import sinusoids
from transformer_vq.ops.runtime import full_precision

NORM_EPS = 1e-6


def rms_norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """Apply RMSNorm without gain or bias over the last axis, in float32 or better."""
    exact = x.to(accumulation_dtype(x.dtype))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        normed: Tensor = _RMSNorm.apply(exact, eps)  # type: ignore[no-untyped-call]
        return normed.to(x.dtype)  # torch has a fused kernel on GPUs only
    return F.rms_norm(exact, x.shape[-1:], eps=eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) in few passes; its gradient needs only the result, which the next layer keeps.

    With y = s x and s = 1 / rms(x), the gradient is s (dy - y mean(y dy)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y: Tensor = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        mean = torch.linalg.vecdot(y, grad).unsqueeze(-1) / y.shape[-1]
        return torch.addcmul(grad, y, mean, value=-1).mul_(scale), None


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, in float32 or better, with a trainable gain on request."""

    def __init__(self, width: int, gain: bool = False, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width)) if gain else None
        self.is_partial = False
        """Under tensor parallelism, whether each rank normalizes heads of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width], same shape as the result."""
        y = rms_norm(x, self.eps)
        return y if self.gain is None else y * local(self.gain, self.is_partial).to(y.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * silu(gate)."""
    # The compiler decides what to keep.
    if torch.compiler.is_compiling():
        return x * F.silu(gate)
    y: Tensor = _Gated.apply(x, gate)  # type: ignore[no-untyped-call]
    return y


class _Gated(torch.autograd.Function):
    """x * silu(gate), keeping only its two inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return F.silu(gate).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        return F.silu(gate).mul_(grad), torch.ops.aten.silu_backward(grad * x, gate)


def linear(d_in: int, d_out: int, bias: bool = False) -> nn.Linear:
    """Return a projection with weights of variance 1 / d_in and, optionally, a zero bias."""
    layer = nn.Linear(d_in, d_out, bias=bias)
    init_linear(layer)
    return layer


def init_linear(layer: nn.Linear) -> None:
    """Draw the initial weights of a projection: variance 1 / d_in, and a zero bias."""
    nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def local(x: Tensor, is_partial: bool = True) -> Tensor:
    """Return this rank's part of a parameter that a module uses itself, under tensor parallelism.

    is_partial: whether the gradient of a replicated parameter is a partial sum, because each rank
    uses it for its own heads or columns.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    from torch.distributed.tensor import DTensor, Partial  # takes a second to load

    if not isinstance(x, DTensor):
        return x
    summed = [Partial() if p.is_replicate() and is_partial else p for p in x.placements]
    part: Tensor = x.to_local(grad_placements=summed)
    return part


def is_plain(layer: nn.Module) -> bool:
    """Return whether calling a linear layer only multiplies by its weight.

    Not so for layers with hooks (offloading), adapters (LoRA) or quantized weights: these must be
    called. Only a plain layer may be replaced by a cheaper product with the same weight.
    """
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and type(layer.weight) in (nn.Parameter, Tensor)
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


class Head(nn.Linear):
    """The output projection, in float32 or better, whatever the precision of the rest."""

    def __init__(self, d_model: int, vocab_size: int, bias: bool = True) -> None:
        super().__init__(d_model, vocab_size, bias)
        init_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. x: [..., d_model] -> [..., vocab_size]."""
        with full_precision(x.device):
            exact = accumulation_dtype(self.weight.dtype)
            bias = None if self.bias is None else self.bias.to(exact)
            return F.linear(x.to(exact), self.weight.to(exact), bias)


class FeedForward(nn.Module):
    """RMSNorm -> Linear -> ReLU^2 -> Linear, or SwiGLU, after the attention of MQA, MHA and GQA."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        checkpoint_activations: bool = False,
        *,
        is_gated: bool = False,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.input_norm = RMSNorm(d_model) if norm is None else norm
        self.in_proj = linear(d_model, d_ff)
        self.gate_proj = linear(d_model, d_ff) if is_gated else None
        self.out_proj = linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual branch. x: [b, t, d_model], same shape as the result."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return y
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = self.input_norm(x)
        h: Tensor = self.in_proj(x)
        if self.gate_proj is not None:
            h = gated(h, self.gate_proj(x))
        elif torch.compiler.is_compiling():
            h = F.relu(h).square()
        else:
            h = _SquaredReLU.apply(h)  # type: ignore[no-untyped-call]
        y: Tensor = self.out_proj(h)
        return y


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2, keeping only x for the backward pass: these activations are the widest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x: Tensor = x.relu().mul_(grad).mul_(2)
        return grad_x


class ScaledSinusoids(nn.Module):
    """Absolute sinusoids times a trainable scalar, which starts at zero."""

    def __init__(self, d_model: int, wavelength: float) -> None:
        super().__init__()
        self.d_model = d_model
        self.wavelength = wavelength
        self.scale = nn.Parameter(torch.zeros(1))  # a vector, because scalars cannot be sharded

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [b, t] -> [b, t, d_model]."""
        scale = local(self.scale, is_partial=False)
        return scale * sinusoids(positions, self.d_model, self.wavelength, scale.dtype)


def draw_keep(shape: tuple[int, ...], p_drop: float, device: torch.device) -> Tensor:
    """Return a dropout mask: False with probability p_drop."""
    return torch.rand(shape, device=device) >= p_drop
