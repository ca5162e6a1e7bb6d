"""Files of JSON lines: read what is valid, write atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_vq.files import write_text
from transformer_vq.progress import warn

Row = dict[str, Any]


def read_rows(path: Path, **types: type) -> list[Row]:
    """Return all valid rows of a file; an empty list if the file does not exist.

    types: of the values that a valid row has. Warns about corrupt lines. An unfinished last line is
    skipped silently, because any crash can cause one.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [_parse(line, types) for line in lines]
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
    """Return a row as a line of JSON."""
    return json.dumps(row) + "\n"


def _parse(text: bytes, types: dict[str, type]) -> Row | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(row, dict) and all(type(row.get(k)) is t for k, t in types.items())
    return row if is_valid else None
