"""Verification of the files of a corpus by size and SHA-256, when it is opened.

Large files are not hashed each time. `verified.json` stores the status (size, times, inode) that
each file had when it was last verified. A file with an unchanged status is not read again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformer_vq.files import (
    CorruptFileError,
    file_digest,
    read_verified_json,
    remove_partial_files,
    write_verified_json,
)

STAMPS = "verified.json"
TICK = 0.02  # seconds; longer than the resolution of file times, so later changes are visible

Record = dict[str, Any]
"""{"size": bytes, "sha256": digest}, as stored for every file in `meta.json`."""


class RecordedFile:
    """A file opened for writing that computes its size and SHA-256 as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self._size = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> RecordedFile:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._size += len(data)
        return self._file.write(data)

    @property
    def record(self) -> Record:
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def record_of(path: Path) -> Record:
    """Return the record of an existing file, after flushing it to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": file_digest(path)}


def mark_verified(folder: Path, records: dict[str, Record]) -> None:
    """Store the status of files that have just been written with these records."""
    stamps = _stamps(folder, records)
    time.sleep(TICK)
    _write_stamps(folder, stamps)


def verify(folder: Path, records: dict[str, Record]) -> None:
    """Raise CorruptFileError unless all files match their records."""
    stamps = _stamps(folder, records)
    for name, record in records.items():
        if stamps[name][1] != record["size"]:
            raise CorruptFileError(
                f"{folder / name} has {stamps[name][1]:,} bytes instead of {record['size']:,}"
            )
    known = _read_stamps(folder)
    changed = [name for name in records if known.get(name) != stamps[name]]
    if not changed:
        return
    time.sleep(TICK)
    for name in changed:
        if file_digest(folder / name) != records[name]["sha256"]:
            raise CorruptFileError(f"{folder / name} is corrupt: its checksum does not match")
    _write_stamps(folder, stamps)


def _stamps(folder: Path, records: dict[str, Record]) -> dict[str, list[Any]]:
    """Return the recorded digest and the current size, times and inode of each file."""
    return {name: [record["sha256"], *_status(folder / name)] for name, record in records.items()}


def _status(path: Path) -> Iterable[int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CorruptFileError(f"{path} does not exist") from None
    except OSError as error:
        raise CorruptFileError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError(f"{path} is not a regular file")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_stamps(folder: Path) -> dict[str, Any]:
    try:
        stamps = read_verified_json(folder / STAMPS).get("files")
    except CorruptFileError:  # all files are hashed again
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_stamps(folder: Path, stamps: dict[str, list[Any]]) -> None:
    with suppress(OSError):  # in a read-only cache, files are hashed each time
        remove_partial_files(folder)
        write_verified_json(folder / STAMPS, {"files": stamps})
