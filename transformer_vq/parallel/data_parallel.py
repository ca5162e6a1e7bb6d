"""Data parallelism: every rank processes its own sequences, and gradients are summed.

Parameters are sharded across ranks and gathered branch by branch when they are needed (FSDP2).
There may be several replicas of the shards; with one shard each, every rank has the full model.
Codebooks are buffers: their statistics are summed once per step, so all ranks update them
identically.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist

from transformer_vq.config import RunConfig
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, lowest
from transformer_vq.parallel.world import World


def shard_parameters(model: TransformerVQ, config: RunConfig, world: World) -> None:
    """Apply FSDP2 in place: shard parameters over fsdp x cp ranks and replicate them over dp."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to load

    # FSDP warns about outputs that are views. They are safe here: nothing overwrites them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = world.axes["fsdp" if world.mesh.dp == 1 else "hsdp"]
    is_bf16 = config.train.precision == "bf16"
    computed, reduced = (torch.bfloat16, torch.float32) if is_bf16 else (None, None)
    # Inputs are not cast: the residual stream stays float32, as under autocast.
    policy = MixedPrecisionPolicy(computed, reduced, cast_forward_inputs=False)
    for branch in model.branches:
        fully_shard(branch, mesh=mesh, mp_policy=policy)
    # No policy for embeddings and head: logits are computed in float32.
    fully_shard(model, mesh=mesh)


def default_group() -> dist.ProcessGroup | None:
    """Return the group of all processes, or None for a single process."""
    is_connected = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if is_connected and dist.get_world_size() > 1 else None


def total_usage(
    usages: tuple[CodeUsage, ...], group: dist.ProcessGroup | None
) -> tuple[CodeUsage, ...]:
    """Sum the code usage over the ranks of a group, which have processed different tokens.

    The result is that of a single process with all tokens. One all-reduce covers all codebooks.
    Candidates need one more message: their priorities belong to tokens, so all layers share them.
    """
    if group is None or not usages:
        return usages
    priority = usages[0].priority
    if priority is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        priorities = [torch.empty_like(priority) for _ in range(size)]
        dist.all_gather(priorities, priority.contiguous(), group=group)
        n_code = len(priority)
        priority, order = lowest(torch.cat(priorities), n_code)
        # Each rank fills the slots of its own candidates; the other ranks add zeros.
        is_own = (order // n_code == rank).unsqueeze(-1)
        usages = tuple(
            replace(usage, candidates=usage.candidates[:, order % n_code] * is_own)
            for usage in usages
            if usage.candidates is not None
        )
    names = ("sum", "count", "error", "energy", "candidates")
    parts = [[getattr(u, name) for name in names if getattr(u, name) is not None] for u in usages]
    flat = torch.cat([x.flatten() for part in parts for x in part])
    dist.all_reduce(flat, group=group)
    totals = iter(flat.split([x.numel() for part in parts for x in part]))
    summed = [CodeUsage(*(next(totals).view_as(x) for x in part)) for part in parts]
    return tuple(replace(usage, priority=priority) for usage in summed)
