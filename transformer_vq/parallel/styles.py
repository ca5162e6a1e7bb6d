"""What PyTorch's parallel styles lack: shared projections, and parameters without a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle


class Shared(ParallelStyle):
    """A replicated projection whose whole output every rank uses for its own heads or columns.

    The gradient of the output is therefore a partial sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (_whole_input, _whole_output)
        return distribute_module(module, device_mesh, None, *hooks)


def _whole_input(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    x = args[0]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return (x,)


def _whole_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
    whole = output.redistribute(placements=[Replicate()])
    local: Tensor = whole.to_local(grad_placements=[Partial()])
    return local


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, axis: Any) -> None:
    """Shard a parameter along an axis; None replicates it."""
    placement = Replicate() if axis is None else Shard(axis)
    x = distribute_tensor(getattr(module, name).data, mesh, [placement])
    module.register_parameter(name, nn.Parameter(x))
