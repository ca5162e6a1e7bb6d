"""Data from standard input, stored in the cache so that it can be read several times."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

from transformer_vq.config import DataConfig
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import CHUNK
from transformer_vq.files import atomic_write
from transformer_vq.progress import progress_bar

STDIN = "-"


def store_stdin(config: DataConfig, cache: Path) -> DataConfig:
    """Return the config with "-" replaced by a file that contains standard input.

    The file is named after its content, so that the same input gives the same corpus. A run needs
    the file again when it is resumed.
    """
    n_given = [*config.path, *config.validation_path, *config.test_path].count(STDIN)
    if n_given == 0:
        return config
    if n_given > 1:
        raise DataError("standard input (-) can be given only once; store it in a file")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise DataError("processes of torchrun cannot share standard input; store it in a file")
    stored = str(_store(cache / "stdin"))

    def stored_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(stored if path == STDIN else path for path in paths)

    return replace(
        config,
        path=stored_paths(config.path),
        validation_path=stored_paths(config.validation_path),
        test_path=stored_paths(config.test_path),
    )


def _store(folder: Path) -> Path:
    if sys.stdin.isatty():
        raise DataError("--data.path -: standard input is a terminal; pipe a file into it")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    waiting = folder / "incoming"
    with (
        atomic_write(waiting) as partial,
        open(partial, "wb") as file,
        progress_bar("reading standard input", None, "B") as advance,
    ):
        while data := sys.stdin.buffer.read(CHUNK):
            digest.update(data)
            file.write(data)
            advance(len(data))
    found = folder / digest.hexdigest()[:16]
    if found.exists():
        waiting.unlink()
    else:
        os.replace(waiting, found)
    return found
