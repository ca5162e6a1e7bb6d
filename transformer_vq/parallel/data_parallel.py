"""Data parallel: every process has its own sequences, and gradients are summed.

Either each process has the whole model (DDP), or its tensors are divided among processes and
gathered branch by branch when they are needed (FSDP2). Codebooks are buffers: their statistics are
summed once per update, and so they stay the same everywhere.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from transformer_vq.config import RunConfig
from transformer_vq.nn.heads import AttentionOutput
from transformer_vq.nn.model import ModelOutput, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage
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
    n_copies, n_shards = world.layout.dp, world.layout.fsdp * world.layout.cp
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


def total_usage(usages: tuple[CodeUsage, ...], world: World) -> tuple[CodeUsage, ...]:
    """Code usage of all processes that have different tokens; one message for all codebooks.

    Candidates are those of the first process on which any token counted.
    """
    if world.size("data") == 1 or not usages:
        return usages
    if usages[0].candidates is not None:
        rank, n_processes = world.rank("data"), world.size("data")
        if world.smallest(rank if bool(usages[0].count.sum() > 0) else n_processes) != rank:
            usages = tuple(replace(u, candidates=torch.zeros_like(u.sum)) for u in usages)
    parts = [[x for x in vars(usage).values() if x is not None] for usage in usages]
    totals = iter(world.sums([x for part in parts for x in part], "data"))
    return tuple(CodeUsage(*(next(totals) for _ in part)) for part in parts)
