"""Data parallel: every process has its own sequences, and gradients are summed.

Either each process has the whole model (DDP), or its tensors are divided among processes and
gathered branch by branch when they are needed (FSDP2). Codebooks are buffers: their statistics are
summed once per update, and so they stay the same everywhere.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from transformer_vq.config import RunConfig
from transformer_vq.nn.heads import AttentionOutput
from transformer_vq.nn.model import ModelOutput, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, lowest
from transformer_vq.parallel.world import World


def replicate(model: TransformerVQ, world: World) -> DistributedDataParallel:
    """A whole model on every process; gradients become means over processes."""
    # Codebooks need no broadcast: all processes update them alike.
    return DistributedDataParallel(
        model,
        process_group=world.group("data"),
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def shard(model: TransformerVQ, config: RunConfig, world: World) -> None:
    """Divide weights, gradients and moments over fsdp x cp, with copies over dp; in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to load

    for kind in (AttentionOutput, ModelOutput):  # so that FSDP finds the tensors in them
        if kind not in _pytree.SUPPORTED_NODES:
            _pytree.register_dataclass(kind)
    # FSDP warns of outputs that are views, which would be a danger only if they were overwritten.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    n_copies, n_shards = world.mesh.dp, world.mesh.fsdp * world.mesh.cp
    mesh = init_device_mesh(
        world.device.type, (n_copies, n_shards), mesh_dim_names=("copies", "shards")
    )
    mesh = mesh["shards"] if n_copies == 1 else mesh
    half = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,  # the residual stream stays float32, as under autocast
    )
    for branch in model.branches:
        fully_shard(branch, mesh=mesh, mp_policy=policy)
    # Embeddings and head stay float32: logits are.
    scalars = {p for p in model.parameters() if p.ndim == 0}  # which cannot be divided
    fully_shard(model, mesh=mesh, ignored_params=scalars)


def default_group() -> dist.ProcessGroup | None:
    """The group of all processes, or None if this one is alone."""
    is_single_process = (
        not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    )
    return None if is_single_process else dist.group.WORLD


def total_usage(
    usages: tuple[CodeUsage, ...], group: dist.ProcessGroup | None
) -> tuple[CodeUsage, ...]:
    """Add up the code usage of all processes of a group, which have different tokens.

    The result is that of one process with all tokens. One message carries all codebooks, and one
    more the priorities of the candidates, which are those of tokens and so the same in all layers.
    """
    if group is None or not usages:
        return usages
    priority = usages[0].priority
    if priority is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        everywhere = [torch.empty_like(priority) for _ in range(size)]
        dist.all_gather(everywhere, priority.contiguous(), group=group)
        n_code = len(priority)
        priority, order = lowest(torch.cat(everywhere), n_code)
        # Each process fills the slots whose candidates it has; the others add zeros.
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
