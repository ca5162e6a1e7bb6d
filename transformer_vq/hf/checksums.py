"""Checksums of an exported folder, so that corrupt files are reported instead of loaded."""

from __future__ import annotations

import os
from pathlib import Path

from transformer_vq.data.tokenizer_files import CONFIG_FILE, JSON_FILE
from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    file_digest,
    read_verified_json,
    write_verified_json,
)

NAME = "checksums.json"
PATTERNS = ("*.safetensors", "*.json", "*.model")


def write_checksums(folder: str | os.PathLike[str], fast_tokenizer: bool = False) -> None:
    """Record the checksums of the model and tokenizer files in a folder.

    fast_tokenizer: whether to include the files of a PreTrainedTokenizerFast. Such a tokenizer does
    not update the checksums when it is saved, so only the export records its files.
    """
    root = Path(folder)
    if not root.is_dir():  # the model was uploaded without a local copy
        return
    found = {path.name for pattern in PATTERNS for path in root.glob(pattern)} - {NAME}
    if not fast_tokenizer and JSON_FILE in found:
        found -= {JSON_FILE, CONFIG_FILE}
    write_verified_json(root / NAME, {"files": {n: file_digest(root / n) for n in sorted(found)}})


def check_folder(folder: object, only: str | None = None) -> None:
    """Raise UserError if a recorded file in the folder has changed.

    folder: a local path; anything else, such as a Hub name, is not checked.
    only: name of a single file to check, because hashing the weights of a large model is slow.
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
