"""Checkpoints of torch.distributed.checkpoint, in the format of `shards`.

The library plans which rank writes which part of a tensor, and which parts of which files a rank
needs on another mesh. Its own files are pickled, so what is here writes and reads others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from transformer_vq.files import file_digest, partial_path, remove, write_json, write_safetensors
from transformer_vq.parallel.shards import INDEX, Index, part_name, read_part

Publish = Callable[[Path, dict[str, str]], None]
"""Receives the folder with all files, and their digests; called on one rank."""


def save_shards(
    folder: Path,
    tensors: dict[str, Tensor],
    publish: Publish,
    group: dist.ProcessGroup | None,
    in_background: bool = False,
) -> Callable[[], None]:
    """Write this rank's parts of tensors, with all ranks of a group; plain tensors are equal there.

    folder: to be published; files are written to a temporary folder next to it. group: None for a
    single process. in_background: return after the tensors are copied. Returns a function that
    waits for the files and raises OSError if they could not be written.
    """
    writer = ShardWriter(folder, publish)
    options = _options(group) | {"storage_writer": writer}

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except (CheckpointException, OSError) as error:
            if writer.partial is not None:
                remove(writer.partial)
            failures = getattr(error, "failures", {0: (error, None)}).values()
            causes = [cause for cause, _ in failures]
            for cause in causes:
                if not isinstance(cause, Exception):  # a second Ctrl-C
                    raise cause from None
            raise OSError("; ".join(sorted({str(cause) for cause in causes}))) from error

    if not in_background:
        guarded(lambda: save(tensors, **options))
        return lambda: None
    # Not `async_save`, whose copy fails for some tensors ("invalid python storage", PyTorch 2.13).
    copies = {name: _copy(x) for name, x in tensors.items()}
    writing = ThreadPoolExecutor(1, "checkpoint")
    future = writing.submit(save, copies, **options)
    writing.shutdown(wait=False)
    return lambda: guarded(future.result)


def _copy(x: Tensor) -> Tensor:
    """Return a copy in host memory, with the same sharding."""
    if not isinstance(x, DTensor):
        return x.detach().to("cpu", copy=True)
    local = x.to_local().detach().to("cpu", copy=True)
    return DTensor(local, x._spec, requires_grad=False)


def load_shards(
    folder: Path, index: Index, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill this rank's parts of tensors in place, whatever the mesh that wrote them."""
    load(tensors, storage_reader=ShardReader(folder, index), **_options(group))


def _options(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return options of `save` and `load`, whose warning about a single process is ignored."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return {"process_group": group, "no_dist": group is None}


class Folder:
    """What writing and reading have in common: the path is known, and plans are kept."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardWriter(Folder, StorageWriter):
    """Writes one safetensors file per rank, then the index."""

    def __init__(self, folder: Path, publish: Publish) -> None:
        self.folder, self.publish = folder, publish
        self.partial: Path | None = None
        """The temporary folder, on the rank that creates it."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one rank: create the temporary folder, and name the file of each rank."""
        folder = self.partial = partial_path(self.folder)
        folder.mkdir(parents=True)
        paths = [folder / f"shard-{i:05d}.safetensors" for i in range(len(plans))]
        return [replace(p, storage_data=path) for p, path in zip(plans, paths, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: write its file."""
        path: Path = plan.storage_data
        parts: dict[str, Any] = {}
        for item in plan.items:
            about = item.tensor_data
            assert about is not None
            part = {"shape": about.chunk.sizes, "offset": about.chunk.offsets}
            parts[part_name(item.index.fqn, part, about.size)] = planner.resolve_data(item)
        results: list[WriteResult] = []
        if parts:
            write_safetensors(path, parts)
            stored = (path.name, file_digest(path))
            results = [WriteResult(item.index, 0, stored) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank: write the index, and publish the folder."""
        assert self.partial is not None
        written = [result for of_rank in results for result in of_rank]
        files = {(r.index.fqn, r.index.offset): r.storage_data[0] for r in written}
        index: Index = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            parts = [
                {"offset": list(x.offsets), "shape": list(x.sizes), "file": files[name, x.offsets]}
                for x in about.chunks
            ]
            dtype = str(about.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(about.size), "parts": parts}
        write_json(self.partial / INDEX, {"tensors": index})
        self.publish(self.partial, dict(r.storage_data for r in written))


class ShardReader(Folder, StorageReader):
    """Reads the parts that this rank needs, one at a time."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        about: dict[str, Any] = {}
        stored = {}
        for name, entry in self.index.items():
            chunks = []
            for part in entry["parts"]:
                offset, shape = torch.Size(part["offset"]), torch.Size(part["shape"])
                chunks.append(ChunkStorageMetadata(offset, shape))
                key = part_name(name, part, entry["shape"])
                stored[MetadataIndex(name, offset)] = (self.folder / part["file"], key)
            dtype = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            about[name] = TensorStorageMetadata(dtype, torch.Size(entry["shape"]), chunks)
        return Metadata(about, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        self.stored = metadata.storage_data

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """On every rank: read its parts, one at a time."""
        for item in plan.items:
            path, key = self.stored[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            target.copy_(read_part(path, key, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
