"""Checksums of an exported folder: damage is reported instead of loaded."""

from __future__ import annotations

import os
from pathlib import Path

from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    file_digest,
    read_verified_json,
    write_verified_json,
)

NAME = "checksums.json"
PATTERNS = ("*.safetensors", "*.json", "*.model")


def write_checksums(folder: str | os.PathLike[str]) -> None:
    """Record the files of a folder that decide what its model and tokenizer do."""
    root = Path(folder)
    if not root.is_dir():  # uploaded without a local copy
        return
    found = {path.name for pattern in PATTERNS for path in root.glob(pattern)} - {NAME}
    write_verified_json(root / NAME, {"files": {n: file_digest(root / n) for n in sorted(found)}})


def check_folder(folder: object, only: str | None = None) -> None:
    """Raise UserError if a recorded file of the folder has changed; hub names are not checked.

    only: the one file to check; hashing the weights of a large model takes a while.
    """
    if not isinstance(folder, (str, os.PathLike)) or not (Path(folder) / NAME).is_file():
        return
    root = Path(folder)
    try:
        recorded = read_verified_json(root / NAME)["files"]
    except CorruptFileError as error:
        raise UserError(f"{error}; export the model again") from error
    for name, digest in recorded.items():
        if only not in (None, name):
            continue
        if not (root / name).is_file() or file_digest(root / name) != digest:
            raise UserError(
                f"{root / name} is missing, corrupt or was edited; export the model again, or "
                f"delete {root / NAME} if the change is intended"
            )
