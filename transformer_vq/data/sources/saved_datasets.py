"""Hugging Face datasets that were saved with `save_to_disk`: folders of Arrow files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_vq.data.sources.base import DataError

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_VALIDATION = ("validation", "valid", "val", "dev", "eval")
_FIX = "save the dataset again with save_to_disk"


def saved_splits(path: Path) -> dict[str, Path] | None:
    """Return the split names and folders of a DatasetDict; None for anything else.

    Other names of validation, such as "dev", become "validation". Further splits keep their names.
    """
    file = path / _SPLITS
    if not file.is_file():
        return None
    names = _read(file).get("splits")
    if not (isinstance(names, list) and names and all(map(_is_name, names))):
        raise DataError(f"{file} does not list the splits of a dataset; {_FIX}")
    validation = next((name for name in _VALIDATION if name in names), None)
    splits = {"validation" if name == validation else name: path / name for name in names}
    for folder in splits.values():
        if not _is_dataset(folder):
            raise DataError(f"{folder} is not a complete dataset; {_FIX}")
    return splits


def only_shards(files: Sequence[Path]) -> list[Path]:
    """Remove the files of saved datasets that are not data; put the others in their order."""
    folders = {file.parent for file in files}
    datasets = {folder: _shards(folder) for folder in sorted(folders) if _is_dataset(folder)}
    parents = {folder.parent for folder in datasets}
    selected, kept = set(files), dict[Path, None]()
    for file in files:
        if file.parent in datasets:
            kept |= dict.fromkeys(x for x in datasets[file.parent] if x in selected)
        elif file.name != _SPLITS or file.parent not in parents:
            kept[file] = None
    return list(kept)


def _is_dataset(folder: Path) -> bool:
    return all(os.path.isfile(folder / name) for name in (_STATE, _INFO))


def _shards(folder: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset in order."""
    file = folder / _STATE
    state = _read(file)
    entries = state.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    names = [x.get("filename", "") if isinstance(x, dict) else "" for x in entries]
    if not names or not all(map(_is_name, names)) or state.get("_indices_data_files"):
        raise DataError(f"{file} does not list the Arrow files of a dataset; {_FIX}")
    shards = [folder / name for name in names]
    for shard in shards:
        if not os.path.lexists(shard):
            raise DataError(f"{shard} does not exist, but {_STATE} lists it; {_FIX}")
    return shards


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON; {_FIX}") from error
    return value if isinstance(value, dict) else {}


def _is_name(value: object) -> bool:
    """Return whether a value is the name of a file in the same folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value
