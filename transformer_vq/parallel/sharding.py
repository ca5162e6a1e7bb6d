"""Sharded tensors for optimizers and checkpoints, as DTensors.

Import this module only where tensors are sharded: torch.distributed.tensor takes a second to load.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transformer_vq.nn.model import TransformerVQ


def sharded_parameters(
    model: TransformerVQ, axes: dict[str, int], mesh: DeviceMesh
) -> dict[str, nn.Parameter]:
    """Return all parameters as DTensors, because optimizers cannot mix them with plain tensors.

    Plain tensors become views of the same memory. Those named in `axes` are shards along that
    axis over the mesh; the others are replicated.
    """
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
    assert isinstance(view, DTensor)
    view.grad = DTensor.from_local(grad, view.device_mesh, view.placements, run_check=False)


def shard_like(x: Tensor, p: Tensor) -> Tensor:
    """Shard a full tensor like p if they have the same shape, else replicate it."""
    assert isinstance(p, DTensor)
    replicated = [Replicate()] * p.device_mesh.ndim
    return distribute_tensor(x, p.device_mesh, p.placements if x.shape == p.shape else replicated)


def gather_full(x: Tensor) -> Tensor:
    """Return the full tensor on the CPU; all ranks must call this together."""
    return full_tensor(x).cpu() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor on its device; all ranks must call this together."""
    return x.full_tensor() if isinstance(x, DTensor) else x
