"""Files and folders that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The name to write to; when that has succeeded, the file takes the place of `path`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """The folder to fill; when that has succeeded, it becomes `folder`, which holds nothing yet."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with written_whole(path) as partial:
        partial.write_text(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """One safetensors file; raises OSError if it cannot be written, for a full disk say."""
    try:
        with written_whole(path) as partial:
            save_file(_apart(tensors), partial, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, those that share memory copied: safetensors takes no others."""
    apart, seen = {}, set()
    for name, x in tensors.items():
        place = x.untyped_storage().data_ptr()
        apart[name] = x.clone(memory_format=torch.contiguous_format) if place in seen else x
        apart[name] = apart[name].contiguous()
        seen.add(place)
    return apart
