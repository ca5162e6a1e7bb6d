"""Tensor parallelism: the plan that shards the width of every layer, applied by PyTorch.

SHGA shards the values, the gates and the output projection along d_v; queries, keys and codebooks
are replicated. MQA shards the query heads. MHA and GQA shard all heads with their codebooks.
Feed-forward layers are sharded by columns, then by rows; embeddings and head by token.

The code of the model is unchanged, except that it takes the `local` part of parameters that it uses
without a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from transformer_vq.config import Heads, ModelConfig
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import AttentionLayer
from transformer_vq.nn.layers import FeedForward, RMSNorm
from transformer_vq.nn.model import TransformerVQ

if TYPE_CHECKING:  # takes a second to load
    from torch.distributed.device_mesh import DeviceMesh

# The plans. A projection is sharded by its output features (column), by its input features (row),
# or not at all (shared: every rank needs the whole output). Other tensors have the axis that is
# sharded; those that are not named are replicated.
COLUMN, ROW, SHARED = "column", "row", "shared"
Plan = Mapping[str, str | int]
ATTENTION: dict[str, Plan] = {
    "value columns": {
        **{"q_proj": SHARED, "k_proj": SHARED, "r_proj": SHARED},
        **{"v_proj": COLUMN, "g_proj": COLUMN, "o_proj": ROW},
    },
    "query heads": {
        **{"q_proj": COLUMN, "k_proj": SHARED, "r_proj": SHARED, "v_proj": SHARED, "o_proj": ROW},
        **{"u": 0, "v": 0},
    },
    "heads": {
        **{"q_proj": COLUMN, "k_proj": COLUMN, "r_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW},
        **{"u": 0, "v": 0, "quantizer.c_sum": 0, "quantizer.c_count": 0},
        **{"quantizer.metric": 0, "quantizer.code_bias": 0, "exact_above": 0},
    },
}
FEED_FORWARD: Plan = {"in_proj": COLUMN, "gate_proj": COLUMN, "out_proj": ROW}
# The same for the fields of attention states.
STATE: dict[str, dict[str, int]] = {
    "value columns": {"v": -1, "mean": -1},
    "query heads": {},
    "heads": {"k": 1, "v": 1, "z": 1, "mean": 1, "count": 1, "kind": 1, "age": 1},
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
        problem = f"does not divide the {width[what]} {what} of this model"
        raise UserError(f"parallel.tp={n}: {problem}; choose a divisor")
    if what == "value columns":
        return replace(heads, d_v=heads.d_v // n)
    n_kv_head = heads.n_kv_head // n if what == "heads" else 1
    return replace(heads, n_head=heads.n_head // n, n_kv_head=n_kv_head)


def check_widths(config: ModelConfig, n: int) -> None:
    """Raise UserError if n ranks cannot shard the widths of a model evenly."""
    shard_heads(config.layer.heads, n)
    if config.feed_forward_width % n:
        problem = f"does not divide the feed-forward width {config.feed_forward_width}"
        raise UserError(f"parallel.tp={n}: {problem}; choose a divisor")


def plan_of(branch: nn.Module, heads: Heads) -> Plan:
    """Return the plan of a branch. heads: those of the full model."""
    return FEED_FORWARD if isinstance(branch, FeedForward) else ATTENTION[sharded(heads)]


def sharded_axes(model: TransformerVQ) -> dict[str, int]:
    """Return the names of the parameters and buffers that are sharded, with their axes."""
    found = {"embed.weight": 0, "head.weight": 0, "head.bias": 0}
    for number, branch in enumerate(model.branches):
        for name, how in plan_of(branch, model.config.layer.heads).items():
            if isinstance(how, int):
                found[f"branches.{number}.{name}"] = how
            elif how != SHARED:
                found[f"branches.{number}.{name}.weight"] = 1 if how == ROW else 0
                if how == COLUMN:
                    found[f"branches.{number}.{name}.bias"] = 0
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers()}
    return {name: axis for name, axis in found.items() if name in names}


def shard_widths(model: TransformerVQ, mesh: DeviceMesh) -> None:
    """Shard every branch, the embeddings and the head in place, over a mesh of one axis."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    from transformer_vq.parallel.styles import Shared, distribute_parameter

    styles = {COLUMN: ColwiseParallel, ROW: RowwiseParallel, SHARED: Shared}
    heads, n = model.config.layer.heads, mesh.size()
    for branch in model.branches:
        plan = plan_of(branch, heads)
        named = {name: styles[how]() for name, how in plan.items() if isinstance(how, str)}
        named = {name: x for name, x in named.items() if getattr(branch, name, None) is not None}
        parallelize_module(branch, mesh, named)
        is_attention = isinstance(branch, AttentionLayer)
        whole = (Replicate(), None) if is_attention else (Replicate(),)
        parallelize_module(
            branch, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        )
        if not isinstance(branch, AttentionLayer):
            continue
        branch.set_heads(shard_heads(heads, n))
        for norm in (branch.q_norm, branch.k_norm):
            if isinstance(norm, RMSNorm):
                norm.is_partial = True
        for name in ("u", "v"):
            if hasattr(branch, name):
                distribute_parameter(branch, name, mesh, plan.get(name))
        quantizer = getattr(branch, "quantizer", None)
        if quantizer is not None and sharded(heads) == "heads":
            for name, x in branch.named_buffers():
                if name in plan:
                    owner = branch.get_submodule(name.rpartition(".")[0])
                    own = x.chunk(n)[mesh.get_local_rank()].clone()
                    setattr(owner, name.rpartition(".")[2], own)
        elif quantizer is not None:
            # All ranks have the same keys, so each has an equal share of the loss.
            quantizer.register_forward_hook(
                lambda _, args, output: replace(output, commit_loss=output.commit_loss / n)
            )
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.gain is not None:
            distribute_parameter(module, "gain", mesh, None)
    if model.positions is not None:
        distribute_parameter(model.positions, "scale", mesh, None)
    embed = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embed": embed, "head": head})
    model.head.register_forward_hook(_gather_outside_of_training)
    model.tie_weights()


def _gather_outside_of_training(head: nn.Module, args: tuple[Any, ...], logits: Any) -> Tensor:
    """Leave logits sharded by token for the loss; gather them for everything else."""
    result: Tensor = logits if head.training else logits.full_tensor()
    return result
