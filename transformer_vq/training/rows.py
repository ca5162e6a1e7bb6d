"""Files of JSON lines with a CRC-32 in each row, so that corrupt lines are detected."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from transformer_vq.files import write_text
from transformer_vq.progress import warn

CHECKSUM = "crc32"

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return all valid rows of a file, without their checksums.

    Warns about corrupt lines. An unfinished last line is skipped silently, because any crash can
    cause one. Returns an empty list if the file does not exist.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [_parse(line) for line in lines]
    if corrupt := [number for number, row in enumerate(rows, start=1) if row is None]:
        warn(
            f"{path}: skipped {len(corrupt)} of {len(rows)} lines, which are corrupt (the first is "
            f"line {corrupt[0]})"
        )
    return [row for row in rows if row is not None]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a file of rows atomically."""
    write_text(path, "".join(map(line, rows)))


def line(row: Row) -> str:
    """Return a row as a line of JSON with a checksum."""
    return json.dumps(row | {CHECKSUM: _checksum(row)}) + "\n"


def _parse(text: bytes) -> Row | None:
    """Return the row of a line without its checksum; None if the line is corrupt."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    checksum = row.pop(CHECKSUM, None)
    return row if checksum == _checksum(row) else None


def _checksum(row: Row) -> str:
    return f"{zlib.crc32(json.dumps(row, sort_keys=True).encode()):08x}"
