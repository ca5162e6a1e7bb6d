"""Tensors that lie in parts on several processes: DTensors, for optimizers and checkpoints.

Imported only where something is divided, because torch.distributed.tensor takes a second to load.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transformer_vq.nn.model import TransformerVQ


def parameters_in_parts(
    model: TransformerVQ, divided: dict[str, int], mesh: DeviceMesh
) -> dict[str, nn.Parameter]:
    """Parameters as DTensors, all of them, since optimizers do not take some of each kind.

    Those that are plain tensors become views of the same memory: parts, along the axis that
    `divided` names, of tensors divided over the mesh, or else the same everywhere.
    """
    found: dict[str, nn.Parameter] = {}
    of_model = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    mesh = mesh if of_model is None else of_model.device_mesh
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            found[name] = p
            continue
        whole = [Replicate()] * mesh.ndim
        placements = [Shard(divided[name])] if name in divided else whole
        found[name] = nn.Parameter(
            DTensor.from_local(p.detach(), mesh, placements, run_check=False)
        )
    return found


def set_gradient(view: Tensor, grad: Tensor) -> None:
    """Give a view of a parameter the gradient that its part has got."""
    assert isinstance(view, DTensor)
    view.grad = DTensor.from_local(grad, view.device_mesh, view.placements, run_check=False)


def divide_like(x: Tensor, p: Tensor) -> Tensor:
    """A whole tensor in the parts of p if it has its shape, else whole on every process."""
    assert isinstance(p, DTensor)
    whole = [Replicate()] * p.device_mesh.ndim
    return distribute_tensor(x, p.device_mesh, p.placements if x.shape == p.shape else whole)


def whole(x: Tensor) -> Tensor:
    """All parts together, on the host; all processes must call this together."""
    return x.full_tensor().cpu() if isinstance(x, DTensor) else x
