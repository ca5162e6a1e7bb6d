"""Data parallelism: every rank processes its own sequences, and gradients are summed.

Each rank has a full copy of the model (DDP), or its tensors are sharded across ranks and gathered
branch by branch when they are needed (FSDP2). Codebooks are buffers: their statistics are summed
once per step, so all ranks update them identically.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from transformer_vq.config import RunConfig
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, lowest
from transformer_vq.parallel.world import World


def replicate(model: TransformerVQ, world: World) -> DistributedDataParallel:
    """Return the model under DDP: replicated on every rank, with gradients averaged over ranks."""
    return DistributedDataParallel(
        model,
        process_group=world.group("data"),
        forward_sync_buffers=False,  # all ranks update the codebooks identically
        gradient_as_bucket_view=True,
    )


def shard_parameters(model: TransformerVQ, config: RunConfig, world: World) -> None:
    """Apply FSDP2 in place: shard parameters over fsdp x cp ranks and replicate them over dp."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to load

    # FSDP warns about outputs that are views. They are safe here: nothing overwrites them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    n_copies, n_shards = world.mesh.dp, world.mesh.fsdp * world.mesh.cp
    mesh = init_device_mesh(
        world.device.type, (n_copies, n_shards), mesh_dim_names=("copies", "shards")
    )
    mesh = mesh["shards"] if n_copies == 1 else mesh
    is_bf16 = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_bf16 else None,
        reduce_dtype=torch.float32 if is_bf16 else None,
        cast_forward_inputs=False,  # the residual stream stays float32, as under autocast
    )
    for branch in model.branches:
        fully_shard(branch, mesh=mesh, mp_policy=policy)
    # No policy for embeddings and head: logits are computed in float32.
    scalars = {p for p in model.parameters() if p.ndim == 0}  # FSDP cannot shard them
    fully_shard(model, mesh=mesh, ignored_params=scalars)


def sharded_parameters(
    model: TransformerVQ, axes: dict[str, int], mesh: DeviceMesh
) -> dict[str, nn.Parameter]:
    """Return all parameters as DTensors, because optimizers cannot mix them with plain tensors.

    Plain tensors become views of the same memory. Those named in `axes` are shards along that
    axis over the mesh; the others are replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to load

    found: dict[str, nn.Parameter] = {}
    by_fsdp = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    mesh = mesh if by_fsdp is None else by_fsdp.device_mesh
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            found[name] = p
            continue
        replicated = [Replicate()] * mesh.ndim
        placements = [Shard(axes[name])] if name in axes else replicated
        found[name] = nn.Parameter(
            DTensor.from_local(p.detach(), mesh, placements, run_check=False)
        )
    return found


def set_gradient(view: Tensor, grad: Tensor) -> None:
    """Set the gradient of a parameter view from that of the local tensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(view, DTensor)
    view.grad = DTensor.from_local(grad, view.device_mesh, view.placements, run_check=False)


def shard_like(x: Tensor, p: Tensor) -> Tensor:
    """Shard a full tensor like p if they have the same shape, else replicate it."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(p, DTensor)
    replicated = [Replicate()] * p.device_mesh.ndim
    return distribute_tensor(x, p.device_mesh, p.placements if x.shape == p.shape else replicated)


def default_group() -> dist.ProcessGroup | None:
    """Return the group of all processes, or None for a single process."""
    is_single_process = (
        not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    )
    return None if is_single_process else dist.group.WORLD


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
