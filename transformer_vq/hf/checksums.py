"""Checksums of an exported folder, so that corrupt files are reported instead of loaded.

`tvq export` records config, weights and vocabulary: everything that is loaded, except for what
users edit. That is README.md, the chat template and the settings of the tokenizer and of
generation. A folder that transformers saves has no checksums: other tools may change its files.
"""

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
PATTERNS = (
    *("config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "*.model"),
)


def write_checksums(folder: Path) -> None:
    """Record the checksums of the files in a folder."""
    paths = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    write_verified_json(folder / NAME, {"files": {p.name: file_digest(p) for p in paths}})


def remove_checksums(folder: str | os.PathLike[str]) -> None:
    """Remove the checksums of a folder whose files are about to change."""
    (Path(folder) / NAME).unlink(missing_ok=True)


def check_folder(folder: object, *patterns: str) -> None:
    """Raise UserError if a recorded file in the folder has changed.

    folder: a local path; anything else, such as a Hub name, is not checked.
    patterns: the files to check, because hashing the weights of a large model is slow; all by
    default.
    """
    if not isinstance(folder, (str, os.PathLike)) or not (Path(folder) / NAME).is_file():
        return
    root = Path(folder)
    try:
        recorded: dict[str, str] = read_verified_json(root / NAME)["files"]
    except CorruptFileError as error:
        raise UserError(f"{error}; export the model again") from error
    for name, digest in recorded.items():
        path = root / name
        if patterns and not any(path.match(pattern) for pattern in patterns):
            continue
        if not path.is_file() or file_digest(path) != digest:
            raise UserError(
                f"{path} is missing, corrupt or was edited; export the model again, or delete "
                f"{root / NAME} if the change is intended"
            )
