"""Tensor parallel: the widths of every layer are divided among processes.

SHGA divides values, gates and the output projection over d_v, while queries, keys and codebooks are
the same everywhere; MQA divides query heads; MHA and GQA divide all heads with their codebooks.
Feed-forward layers are divided by columns, then by rows. The model's code does not know of it: its
modules become narrower, and two hooks make the sums, one over the outputs of a branch, one over the
gradients of its input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from transformer_vq.config import ModelConfig
from transformer_vq.errors import UserError
from transformer_vq.nn.heads import Attention
from transformer_vq.nn.layers import FeedForward
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import Quantized
from transformer_vq.parallel.world import World

# The axis along which a tensor of a branch is divided; all others are whole everywhere.
ATTENTION = {
    "value columns": {"v_proj.weight": 0, "g_proj.weight": 0, "o_proj.weight": 1},
    "query heads": {"q_proj.weight": 0, "u": 0, "v": 0, "o_proj.weight": 1},
    "heads": {
        **{"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "r_proj.weight": 0},
        **{"u": 0, "v": 0, "o_proj.weight": 1, "quantizer.c_sum": 0, "quantizer.c_count": 0},
    },
}
FEED_FORWARD = {"in_proj.weight": 0, "out_proj.weight": 1}
STATE: dict[str, dict[str, int]] = {
    "value columns": {"v": -1, "cache/mean": -1},
    "query heads": {},
    "heads": {"k": 1, "v": 1, "z": 1, "cache/mean": 1, "cache/count": 1},
}


def check_widths(config: ModelConfig, n: int) -> None:
    """Raises UserError if the widths of a model cannot be divided by n."""
    config.layer.heads.shard(n)
    if config.d_ff % n:
        raise UserError(
            f"parallel.tp={n}: the feed-forward width {config.d_ff} cannot be divided by it; "
            "choose another"
        )


def divided_axes(model: TransformerVQ) -> dict[str, int]:
    """Names of the tensors of a model that are divided, and along which axis."""
    found: dict[str, int] = {}
    for number, branch in enumerate(model.branches):
        axes = ATTENTION[model.config.layer.heads.sharded]
        if isinstance(branch, FeedForward):
            axes = FEED_FORWARD
        there = branch.state_dict()  # full attention has no codebooks
        found |= {f"branches.{number}.{name}": axes[name] for name in axes if name in there}
    return found


def divide_widths(model: TransformerVQ, world: World) -> dict[str, int]:
    """Make every branch narrower, in place; names and axes of the tensors that were divided."""
    heads = model.config.layer.heads
    divided = divided_axes(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, dim in divided.items():
        tensors[name].data = world.part(tensors[name].data, "tp", dim).clone()
    for branch in model.branches:
        if isinstance(branch, Attention):
            branch.set_heads(heads.shard(world.size("tp")))
        _add_hooks(branch, world, shares_keys=heads.sharded != "heads")
    return divided


def _add_hooks(branch: nn.Module, world: World, shares_keys: bool) -> None:
    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_SumGradients.apply(args[0], world), *args[1:])

    def leave(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        total: Tensor = _SumOutputs.apply(output, world)
        return total

    def share_commitment(_: nn.Module, args: tuple[Any, ...], output: Quantized) -> Quantized:
        return replace(output, commit_loss=output.commit_loss / world.size("tp"))

    branch.register_forward_pre_hook(enter)
    last = branch.o_proj if isinstance(branch, Attention) else branch.out_proj
    assert isinstance(last, nn.Module)
    last.register_forward_hook(leave)
    quantizer = getattr(branch, "quantizer", None)
    if quantizer is not None and shares_keys:
        # The same keys everywhere: each process answers for its part of their commitment.
        quantizer.register_forward_hook(share_commitment)


def undivided(model: TransformerVQ, divided: dict[str, int]) -> list[nn.Parameter]:
    """Parameters of branches that are whole everywhere, of whose gradient each process has a part.

    Those outside of branches get the whole gradient on every process.
    """
    return [
        p
        for name, p in model.named_parameters()
        if name.startswith("branches.") and name not in divided
    ]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(grad, "tp"), None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        return world.sum(x, "tp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
