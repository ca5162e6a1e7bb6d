"""The processes of a run: their number, the place of this one, and what all of them agree on.

`torchrun` starts them and tells each its rank. They form a mesh of four axes, dp x fsdp x cp x tp;
`rows` stands for dp and fsdp together, `data` for all but tp. A process that is alone never touches
torch.distributed.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from transformer_vq.config import ParallelConfig
from transformer_vq.device import find_device

AXES = ("dp", "fsdp", "cp", "tp")
JOINED = {"rows": ("dp", "fsdp"), "data": ("dp", "fsdp", "cp")}


class World:
    """This process among the others; without a mesh it is alone."""

    def __init__(self, mesh: ParallelConfig | None = None, device: str = "cpu") -> None:
        self.mesh = ParallelConfig(dp=1) if mesh is None else mesh.fill(n_processes())
        self.device = _own_device(device)
        self.axes: dict[str, DeviceMesh] = {}
        if self.mesh.n_processes == 1:
            return
        shape = tuple(getattr(self.mesh, axis) for axis in AXES)
        devices = init_device_mesh(self.device.type, shape, mesh_dim_names=AXES)
        self.axes = {axis: devices[axis] for axis in AXES}
        self.axes |= {name: devices[axes]._flatten(name) for name, axes in JOINED.items()}

    @property
    def is_single_process(self) -> bool:
        return not self.axes

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes what only one can write."""
        return self.is_single_process or dist.get_rank() == 0

    def size(self, axis: str) -> int:
        return 1 if self.is_single_process else self.axes[axis].size()

    def rank(self, axis: str) -> int:
        return 0 if self.is_single_process else self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    def group_or_none(self, axis: str) -> dist.ProcessGroup | None:
        """The group along an axis; None if this process is alone there."""
        return None if self.size(axis) == 1 else self.group(axis)

    def sum(self, x: Tensor, axis: str) -> Tensor:
        """The sum over all processes along an axis."""
        if self.size(axis) == 1:
            return x
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self.group(axis))
        return total

    def sums(self, tensors: list[Tensor], axis: str) -> list[Tensor]:
        """`sum` of several tensors in one message."""
        if self.size(axis) == 1 or not tensors:
            return tensors
        total = self.sum(torch.cat([x.flatten() for x in tensors]), axis)
        parts = total.split([x.numel() for x in tensors])
        return [part.view_as(x) for part, x in zip(parts, tensors, strict=True)]

    def smallest(self, n: int) -> int:
        """The smallest of the numbers that all processes have."""
        if self.is_single_process:
            return n
        x = torch.tensor(n, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MIN)
        return int(x)

    def largest(self, n: int) -> int:
        """The largest of the numbers that all processes have."""
        return -self.smallest(-n)

    def any(self, flag: bool) -> bool:
        """Whether it holds for at least one process."""
        return not self.smallest(not flag)

    def from_rank_zero(self, n: int) -> int:
        """The number that the first process has."""
        if self.is_single_process:
            return n
        x = torch.tensor(n, device=self.device)
        dist.broadcast(x, src=0)
        return int(x)

    def gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """The parts along an axis as one tensor on its first process; elsewhere the own part."""
        if self.size(axis) == 1:
            return x
        sent = x.to(torch.uint8) if x.dtype == torch.bool else x
        sent = sent.contiguous()
        is_rank_zero = self.rank(axis) == 0
        parts = [torch.empty_like(sent) for _ in range(self.size(axis))] if is_rank_zero else None
        dist.gather(sent, parts, group=self.group(axis), group_dst=0)
        return x if parts is None else torch.cat(parts, dim).to(x.dtype)

    def part(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """This process's part of a tensor that all have: the inverse of `gather`."""
        return x.chunk(self.size(axis), dim)[self.rank(axis)]

    @contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        """What is written below is made by one process per machine and found by the others."""
        is_ahead = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if not self.is_single_process and not is_ahead:
            dist.barrier()
        yield
        if not self.is_single_process and is_ahead:
            dist.barrier()


@contextmanager
def joined(mesh: ParallelConfig, device: str) -> Iterator[World]:
    """The world in which the body is worked on by all processes that `torchrun` has started."""
    mesh.fill(n_processes())  # before anything is opened
    if n_processes() == 1 or dist.is_initialized():
        yield World(mesh, device)
        return
    own = _own_device(device)
    backend = "nccl" if own.type == "cuda" else "gloo"
    store, rank, size = _own_store()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=own if own.type == "cuda" else None,
    )
    yield World(mesh, device)
    # Not after an error: the others may be gone, and there is nobody to take leave of.
    dist.destroy_process_group()


def _own_store() -> tuple[Store, int, int]:
    """The store of `torchrun` as far as it belongs to this start, with rank and world size.

    After a failure torchrun starts all processes anew but keeps the store, where those of before
    have left their addresses. So the first process names each start, and tells the name to those
    who greet it with a word that nobody has used before.
    """
    store, rank, size = next(rendezvous("env://"))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"tvq/greeting/{rank}", name)
        name = store.get(f"tvq/answer/{name}").decode()
        store.set(f"tvq/{name}/{rank}", "here")
    missing = set(range(1, size)) if rank == 0 else set()
    deadline = time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"tvq/greeting/{other}"]):
                store.set(f"tvq/answer/{store.get(f'tvq/greeting/{other}').decode()}", name)
            if store.check([f"tvq/{name}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(missing)} of {size} have not appeared")
        time.sleep(0.01)
    return PrefixStore(name, store), rank, size


def leave(status: int = 0) -> None:
    """End one of several processes with an exit status, skipping interpreter shutdown.

    Its threads may still have tensors to let go of, for which they need the interpreter. One
    that is ending aborts them instead, and torchrun takes a finished run for a failed one.
    """
    if n_processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def n_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def _own_device(name: str) -> torch.device:
    """The device of that name; of several GPUs the one with the number of the local rank."""
    device = find_device(name)
    if device.type == "cuda" and device.index is None and n_processes() > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device
