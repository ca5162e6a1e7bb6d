"""Compressed files, read as a stream of decompressed bytes: .gz, .xz, .bz2 and .zip."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file for reading; decompress it if its suffix names a supported format.

    Raises one of `paths.READ_ERRORS` if the file is corrupt. A zip file must contain one file.
    """
    if path.suffix.lower() == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            archive.close()
            raise zipfile.BadZipFile(f"it contains {len(names)} files instead of one")
        return archive.open(names[0])
    opened: IO[bytes] = _OPENERS.get(path.suffix.lower(), open)(path, "rb")
    return opened


def decompressed_size(path: Path) -> int:
    """Return how many bytes `open_decompressed` yields; compressed files are read completely."""
    if path.suffix.lower() not in (".zip", *_OPENERS):
        return path.stat().st_size
    with open_decompressed(path) as file:
        size = 0
        while data := file.read(CHUNK):
            size += len(data)
        return size
