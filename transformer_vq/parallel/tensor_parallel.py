"""Tensor parallelism: the widths of every layer are sharded across ranks.

SHGA shards values, gates and the output projection along d_v; queries, keys and codebooks are
replicated. MQA shards the query heads. MHA and GQA shard all heads with their codebooks.
Feed-forward layers are sharded by columns, then by rows.

The code of the model is unchanged: its modules become narrower, and two hooks add all-reduces. One
sums the outputs of a branch, the other sums the gradients of its input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from transformer_vq.config import Heads, ModelConfig
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import AttentionLayer
from transformer_vq.nn.layers import FeedForward
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import Quantized
from transformer_vq.parallel.world import World

# Tensors of a branch that are sharded, and the axis; the others are replicated.
ATTENTION = {
    "value columns": {"v_proj.weight": 0, "g_proj.weight": 0, "o_proj.weight": 1},
    "query heads": {"q_proj.weight": 0, "u": 0, "v": 0, "o_proj.weight": 1},
    "heads": {
        **{"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "r_proj.weight": 0},
        **{"u": 0, "v": 0, "o_proj.weight": 1, "quantizer.c_sum": 0, "quantizer.c_count": 0},
    },
}
FEED_FORWARD = {"in_proj.weight": 0, "out_proj.weight": 1}
# The same for the fields of `AttentionState` and `CacheStats`.
STATE: dict[str, dict[str, int]] = {
    "value columns": {"v": -1, "mean": -1},
    "query heads": {},
    "heads": {"k": 1, "v": 1, "z": 1, "mean": 1, "count": 1},
}


def sharded(heads: Heads) -> str:
    """Return what is sharded: the first of the three that there are several of."""
    if heads.n_kv_head > 1:
        return "heads"
    return "query heads" if heads.n_head > 1 else "value columns"


def shard_heads(heads: Heads, n: int) -> Heads:
    """Return the geometry of one of n ranks; raise UserError if n does not divide it."""
    what = sharded(heads)
    width = {"heads": heads.n_kv_head, "query heads": heads.n_head, "value columns": heads.d_v}
    if width[what] % n:
        raise UserError(
            f"parallel.tp={n}: does not divide the {width[what]} {what} of this model; choose a "
            "divisor"
        )
    if what == "value columns":
        return replace(heads, d_v=heads.d_v // n)
    n_kv_head = heads.n_kv_head // n if what == "heads" else 1
    return replace(heads, n_head=heads.n_head // n, n_kv_head=n_kv_head)


def check_widths(config: ModelConfig, n: int) -> None:
    """Raise UserError if n ranks cannot shard the widths of a model evenly."""
    shard_heads(config.layer.heads, n)
    if config.d_ff % n:
        raise UserError(
            f"parallel.tp={n}: does not divide the feed-forward width {config.d_ff}; choose a "
            "divisor"
        )


def sharded_axes(model: TransformerVQ) -> dict[str, int]:
    """Return the names of the parameters and buffers that are sharded, with their axes."""
    found: dict[str, int] = {}
    for number, branch in enumerate(model.branches):
        axes = ATTENTION[sharded(model.config.layer.heads)]
        if isinstance(branch, FeedForward):
            axes = FEED_FORWARD
        names = branch.state_dict()  # full attention has no codebooks
        found |= {f"branches.{number}.{name}": axes[name] for name in axes if name in names}
    return found


def shard_widths(model: TransformerVQ, world: World, compiled: bool = False) -> dict[str, int]:
    """Shard every branch in place; return the `sharded_axes`.

    compiled: whether branches are compiled; their all-reduces stay eager.
    """
    heads = model.config.layer.heads
    axes = sharded_axes(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, dim in axes.items():
        tensors[name].data = world.shard(tensors[name].data, "tp", dim).clone()
    for branch in model.branches:
        if isinstance(branch, AttentionLayer):
            branch.set_heads(shard_heads(heads, world.size("tp")))
        _add_hooks(branch, world, sharded(heads) != "heads", compiled)
    return axes


def _add_hooks(branch: nn.Module, world: World, replicated_keys: bool, compiled: bool) -> None:
    def sum_input_gradients(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = _SumGradients.apply(args[0], world)  # type: ignore[no-untyped-call]
        return (x, *args[1:])

    def sum_outputs(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        total: Tensor = _SumOutputs.apply(output, world)  # type: ignore[no-untyped-call]
        return total

    def divide_commit_loss(_: nn.Module, args: tuple[Any, ...], output: Quantized) -> Quantized:
        return replace(output, commit_loss=output.commit_loss / world.size("tp"))

    branch.register_forward_pre_hook(sum_input_gradients)
    last = branch.o_proj if isinstance(branch, AttentionLayer) else branch.out_proj
    assert isinstance(last, nn.Module)
    last.register_forward_hook(torch.compiler.disable(sum_outputs) if compiled else sum_outputs)
    quantizer = getattr(branch, "quantizer", None)
    if quantizer is not None and replicated_keys:
        # All ranks have the same keys: each contributes an equal share of the commitment loss.
        quantizer.register_forward_hook(divide_commit_loss)


def unsharded_parameters(model: TransformerVQ, axes: dict[str, int]) -> list[nn.Parameter]:
    """Return the replicated parameters of branches; each rank has a partial sum of their gradients.

    Parameters outside of branches have the complete gradient on every rank.
    """
    return [
        p
        for name, p in model.named_parameters()
        if name.startswith("branches.") and name not in axes
    ]


class _SumGradients(torch.autograd.Function):
    """The identity; the backward pass sums gradients over the tp ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(grad, "tp"), None


class _SumOutputs(torch.autograd.Function):
    """The sum over the tp ranks; the backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        return world.sum(x, "tp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
