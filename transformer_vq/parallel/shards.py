"""The format of checkpoints: parts of tensors in safetensors files, and a JSON index of them.

    {"tensors": {name: {"dtype": "float32", "shape": [4, 8], "parts": [
        {"offset": [0, 0], "shape": [2, 8], "file": "shard-00000.safetensors"}, ...]}}}

A part that is the whole tensor has its name in the file; others also have their offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.files import CorruptFileError, read_object

INDEX = "index.json"
Index = dict[str, dict[str, Any]]
"""dtype, shape and parts of each tensor."""


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
        x = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for part in entry["parts"]:
            target = x[_slices(part["offset"], part["shape"])]
            path, key = folder / part["file"], part_name(name, part, x.shape)
            target.copy_(read_part(path, key, [0] * x.ndim, part["shape"]))
        found[name.removeprefix(prefix)] = x
    return found


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
