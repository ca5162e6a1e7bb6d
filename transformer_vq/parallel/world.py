"""The world of a run: the process mesh, the rank of this process and the collectives on the mesh.

`torchrun` starts the processes and sets their ranks. The mesh has four axes: replicas of the model,
shards of the model, shards of sequences (cp) and shards of the widths (tp). More names combine
axes: `rows` have different sequences, `data` has different tokens, `fsdp` is what parameters
are sharded over, `hsdp` these with the replicas. A single process never uses torch.distributed.
"""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from transformer_vq.config import ParallelConfig
from transformer_vq.device import find_device

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
COMBINED_AXES = {"rows": ("dp_replicate", "dp_shard"), "data": ("dp_replicate", "dp_shard", "cp")}


class World:
    """The processes of a run, seen from this rank; without a mesh, a single process."""

    def __init__(self, mesh: ParallelConfig | None = None, device: str = "cpu") -> None:
        self.mesh = ParallelConfig(dp=1) if mesh is None else mesh.fill(n_processes())
        self.device = _own_device(device)
        self.axes: dict[str, DeviceMesh] = {}
        """The mesh of each axis and combination of axes."""
        if self.mesh.n_processes == 1:
            return
        shape = (self.mesh.dp, self.mesh.fsdp, self.mesh.cp, self.mesh.tp)
        # Two views of one mesh, because FSDP has a single axis for what shards parameters.
        ranks = init_device_mesh(self.device.type, (math.prod(shape),), mesh_dim_names=("world",))
        fine = ranks._unflatten(0, shape, AXES)
        by_fsdp = (shape[0], shape[1] * shape[2], shape[3])
        coarse = ranks._unflatten(0, by_fsdp, ("dp_replicate", "fsdp", "tp"))
        self.device_mesh = fine
        self.axes = {axis: fine[axis] for axis in AXES}
        self.axes |= {name: fine[axes]._flatten(name) for name, axes in COMBINED_AXES.items()}
        self.axes |= {"fsdp": coarse["fsdp"], "tp": coarse["tp"]}
        self.axes["hsdp"] = coarse["dp_replicate", "fsdp"]
        # DTensor sums over several axes in a single all-reduce if it finds them flattened.
        coarse._flatten("all")
        coarse["fsdp", "tp"]._flatten("model")

    @property
    def is_single_process(self) -> bool:
        return not self.axes

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process among all."""
        return 0 if self.is_single_process else dist.get_rank()

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return 1 if self.is_single_process else self.axes[axis].size()

    def rank(self, axis: str) -> int:
        """Return the rank of this process along an axis."""
        return 0 if self.is_single_process else self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group along an axis; not for a single process."""
        return self.axes[axis].get_group()

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """A group of all ranks for checkpoints, which may be written while training goes on.

        None for a single process; all ranks must use it together.
        """
        return None if self.is_single_process else dist.new_group(backend="gloo")

    def sum(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum of x over the ranks along an axis."""
        if self.size(axis) == 1:
            return x
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self.group(axis))
        return total

    def smallest(self, n: int) -> int:
        """Return the minimum of n over all ranks."""
        if self.is_single_process:
            return n
        x = torch.tensor(n)  # on the CPU, because reading it must not wait for the GPU
        dist.all_reduce(x, dist.ReduceOp.MIN)
        return int(x)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        return not self.smallest(not flag)

    def from_rank_zero(self, n: int) -> int:
        """Return the value of n on rank 0."""
        if self.is_single_process:
            return n
        x = torch.tensor(n)
        dist.broadcast(x, src=0)
        return int(x)

    @contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        """Run the body on local rank 0 of each machine first, then on the other ranks.

        The others find the files that local rank 0 has written.
        """
        is_local_rank_zero = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if not self.is_single_process and not is_local_rank_zero:
            dist.barrier()
        yield
        if not self.is_single_process and is_local_rank_zero:
            dist.barrier()


@contextmanager
def join_world(mesh: ParallelConfig, device: str) -> Iterator[World]:
    """Connect the processes that `torchrun` started, and yield their world to the body."""
    mesh.fill(n_processes())  # reject an invalid mesh before any connection is opened
    if n_processes() == 1 or dist.is_initialized():
        yield World(mesh, device)
        return
    own = _own_device(device)
    backend, device_id = ("cpu:gloo,cuda:nccl", own) if own.type == "cuda" else ("gloo", None)
    store, rank, size = _own_store()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    yield World(mesh, device)
    # Skipped after an error: other ranks may have exited, and destroying the group would hang.
    dist.destroy_process_group()


def _own_store() -> tuple[Store, int, int]:
    """Return the store of `torchrun` restricted to this launch, the rank and the world size.

    After a failure torchrun restarts all processes but keeps the store, which still contains the
    addresses of the previous launch. So rank 0 draws a new prefix for each launch. Every other
    rank sends a unique id, and rank 0 replies to that id with the prefix.
    """
    store, rank, size = next(rendezvous("env://"))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"tvq/request/{rank}", name)
        name = store.get(f"tvq/reply/{name}").decode()
        store.set(f"tvq/{name}/{rank}", "joined")
    missing = set(range(1, size)) if rank == 0 else set()
    deadline = time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"tvq/request/{other}"]):
                store.set(f"tvq/reply/{store.get(f'tvq/request/{other}').decode()}", name)
            if store.check([f"tvq/{name}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not join in time")
        time.sleep(0.01)
    return PrefixStore(name, store), rank, size


def leave(status: int = 0) -> None:
    """Exit one of several processes with a status, skipping interpreter shutdown.

    Its threads may still release tensors, which requires a running interpreter. An interpreter
    that is shutting down aborts them, and torchrun would report a finished run as failed.
    """
    if n_processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def n_processes() -> int:
    """Return the world size; 1 without `torchrun`."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def _own_device(name: str) -> torch.device:
    """Return the device of that name; with several GPUs, the one of the local rank."""
    device = find_device(name)
    if device.type == "cuda" and device.index is None and n_processes() > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device
