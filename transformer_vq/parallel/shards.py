"""Parts of tensors, in memory and in the format of checkpoints: safetensors with a JSON index.

    {"tensors": {name: {"dtype": "float32", "shape": [4, 8], "parts": [
        {"offset": [0, 0], "shape": [2, 8], "file": "shard-00000.safetensors"}, ...]}}}

A part that is the whole tensor has its name in the file; others also have their offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.files import CorruptFileError, read_object

INDEX = "index.json"
Index = dict[str, dict[str, Any]]
"""dtype, shape and parts of each tensor."""


class Shard:
    """This rank's part of a tensor; all of it if the tensor is not sharded."""

    def __init__(self, x: Any) -> None:
        self.shape: torch.Size = x.shape
        self.local: Tensor = x
        self.slices: tuple[slice, ...] = (slice(None),) * x.ndim
        self.n_copies = 1
        """Number of ranks with the same part."""
        if is_sharded(x):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            mesh, placements = x.device_mesh, x.placements
            shape, offset = compute_local_shape_and_global_offset(x.shape, mesh, placements)
            self.local, self.slices = x.to_local(), _slices(offset, shape)
            sizes = zip(placements, mesh.shape, strict=True)
            self.n_copies = math.prod(n for placement, n in sizes if placement.is_replicate())


def is_sharded(x: Tensor) -> TypeGuard[Any]:
    """Return whether x is a DTensor, whose module takes a second to load."""
    return hasattr(x, "to_local")


def read_index(folder: Path) -> Index:
    """Return the index of a folder; raise CorruptFileError if it has none."""
    found = read_object(folder / INDEX).get("tensors")
    if not isinstance(found, dict):
        raise CorruptFileError(f"{folder / INDEX} is not an index of tensors")
    return found


def read_whole(folder: Path, index: Index, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, in full and without the prefix."""
    found = {}
    for name, entry in index.items():
        if not name.startswith(prefix):
            continue
        x = empty(entry)
        for part in entry["parts"]:
            target = x[_slices(part["offset"], part["shape"])]
            path, key = folder / part["file"], part_name(name, part, x.shape)
            target.copy_(read_part(path, key, [0] * x.ndim, part["shape"]))
        found[name.removeprefix(prefix)] = x
    return found


def empty(entry: dict[str, Any], device: torch.device | str | None = None) -> Tensor:
    """Return zeros with the dtype and shape of an entry of an index."""
    return torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=device)


def _slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(i, i + n) for i, n in zip(offset, shape, strict=True))


def part_name(name: str, part: dict[str, Any], shape: Sequence[int]) -> str:
    """Return the name of a part of a tensor in its file."""
    if list(part["shape"]) == list(shape):
        return name
    return f"{name}@{','.join(map(str, part['offset']))}"


def read_part(path: Path, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a part of a tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            if not shape:
                scalar: Tensor = file.get_tensor(key)
                return scalar
            found: Tensor = file.get_slice(key)[_slices(offset, shape)]
            return found
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is not a readable safetensors file: {error}") from error
