"""The format of a file, recognized by its name and its first bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO

from transformer_vq.config.data import Format
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import (
    COMPRESSED_SUFFIXES,
    ChunkStream,
    encoding_of,
    utf8_chunks,
)
from transformer_vq.data.sources.records import starts_with_json_lines

FORMAT_NAMES = {
    **{"text": "text", "jsonl": "JSONL", "json": "JSON", "csv": "CSV", "tsv": "TSV"},
    **{"parquet": "Parquet", "arrow": "Arrow"},
}
_SUFFIXES: dict[str, Format] = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".tab": "tsv", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"},
}
_HEAD = 1 << 16
_PARQUET, _ARROW = b"PAR1", b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_TAR = slice(257, 262)


class NotTextError(Exception):
    """A file that is not text; the message says what it is."""


def recognize(name: str, open_stream: Callable[[], IO[bytes]], format: Format = "auto") -> Format:
    """Return the format of a file. format: what the user says it is; auto looks at the file.

    open_stream: opens the decompressed file. Raises NotTextError for binary data, and DataError if
    the name promises another content.
    """
    if format == "text":  # the user's choice for any file
        return format
    with open_stream() as stream:
        head = stream.read(_HEAD)
        found = _column_format(head)
        if found is not None and format in ("auto", found):
            _check_end(name, found, stream, head)
            return found
    is_given = format != "auto"
    if not is_given:
        format = _SUFFIXES.get(_suffix(name), "text")
    if format in ("parquet", "arrow"):
        raise DataError(
            f"{name} is not {'an' if format == 'arrow' else 'a'} {FORMAT_NAMES[format]} file; copy "
            "or download it again, or set --data.format"
        )
    if (binary := _binary_kind(head)) is not None:
        raise NotTextError(binary)
    if not is_given and format in ("text", "csv", "tsv") and _may_be_json(head):
        with open_stream() as stream:
            lines = io.BufferedReader(ChunkStream(utf8_chunks(stream)))
            if starts_with_json_lines(lines):
                return "jsonl"
    return format


def _suffix(name: str) -> str:
    """Return the suffix of a name in lower case, without that of a compression."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSED_SUFFIXES else suffix


def _column_format(head: bytes) -> Format | None:
    if head.startswith(_PARQUET):
        return "parquet"
    if head.startswith(_ARROW) or (head.startswith(_ARROW_STREAM) and len(head) > 8):
        return "arrow"
    return None


def _check_end(name: str, format: Format, stream: IO[bytes], head: bytes) -> None:
    """Reject a file whose end is missing, before hours of work. Compressed ones are not checked."""
    mark = _PARQUET if format == "parquet" else _ARROW
    if type(stream) is not io.BufferedReader or not head.startswith(mark):
        return
    stream.seek(-len(mark), os.SEEK_END)
    if stream.read() != mark:
        raise DataError(
            f"{name} is not a complete {FORMAT_NAMES[format]} file (its end is missing); copy or "
            "download it again"
        )


def _binary_kind(head: bytes) -> str | None:
    """Return what binary data is, or None for text."""
    if head.startswith(b"%PDF-"):
        return "a PDF document"
    if head[_TAR] == b"ustar":
        return "a tar archive, which must be extracted"
    if b"\0" in head and encoding_of(head)[1] == "utf-8":
        return "binary data"
    return None


def _may_be_json(head: bytes) -> bool:
    mark, encoding = encoding_of(head)
    text = head[len(mark) :]
    if encoding != "utf-8":
        text = text.decode(encoding, "replace").encode()
    text = text.lstrip()
    return not text or text.startswith(b"{")
