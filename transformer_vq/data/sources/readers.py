"""Documents from text files of any format, one after the other, without loading a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.columns import read_arrow, read_parquet, seekable
from transformer_vq.data.sources.compression import CHUNK, ChunkStream, Files, utf8_chunks
from transformer_vq.data.sources.inputs import Input, unreadable
from transformer_vq.data.sources.paths import READ_ERRORS
from transformer_vq.data.sources.records import (
    read_csv,
    read_json,
    read_jsonl,
    starts_with_json_lines,
)
from transformer_vq.errors import UserError


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one document: a record, or at most 1 MB of a text file."""

    data: bytes
    """Never empty."""
    starts_document: bool
    name: str = ""
    """The file it is from, for messages."""


@dataclass
class ReadCounts:
    """What `read_pieces` has read so far."""

    documents: int = 0
    """All documents, including empty ones."""
    empty: int = 0
    """Documents without any text, which are skipped."""


def read_pieces(
    inputs: Sequence[Input], text_field: str | None = None, counts: ReadCounts | None = None
) -> Iterator[Piece]:
    """Yield the documents of all inputs in order.

    text_field: the field or column with the text; None takes "text", or the only field with text.
    Raises DataError immediately for invalid content. Files that cannot be read are reported
    together, after everything else has been read.
    """
    counts = ReadCounts() if counts is None else counts
    failed: list[tuple[str, Exception]] = []
    with Files() as files:
        for input in inputs:
            try:
                if input.format == "text":
                    yield from _text_pieces(files, input, counts)
                else:
                    yield from _record_pieces(files, input, text_field, counts)
            except UserError:
                raise
            except READ_ERRORS as error:
                failed.append((input.name, error))
    if failed:
        raise unreadable(failed, len(inputs))


def _text_pieces(files: Files, input: Input, counts: ReadCounts) -> Iterator[Piece]:
    is_empty = True
    counts.documents += 1
    with files.open(input.path, input.member) as stream:
        for data in utf8_chunks(stream):
            yield Piece(data, is_empty, input.name)
            is_empty = False
    counts.empty += is_empty


def _record_pieces(
    files: Files, input: Input, text_field: str | None, counts: ReadCounts
) -> Iterator[Piece]:
    for data in _records(files, input, text_field):
        counts.documents += 1
        if data:
            yield Piece(data, True, input.name)
        else:
            counts.empty += 1


def _records(files: Files, input: Input, text_field: str | None) -> Iterator[bytes]:
    def open_chunks() -> Iterator[bytes]:
        with files.open(input.path, input.member) as stream:
            yield from utf8_chunks(stream)

    def lines() -> io.BufferedReader:
        return io.BufferedReader(ChunkStream(open_chunks()), CHUNK)

    format, name = input.format, input.name
    if format == "json" and starts_with_json_lines(lines()):
        format = "jsonl"
    match format:
        case "jsonl":
            yield from read_jsonl(lines(), name, text_field)
        case "json":
            yield from read_json(open_chunks, name, text_field)
        case "csv" | "tsv":
            yield from read_csv(lines(), name, text_field, "," if format == "csv" else "\t")
        case "parquet" | "arrow":
            read = read_parquet if format == "parquet" else read_arrow
            with files.open(input.path, input.member) as stream, seekable(stream) as file:
                yield from read(file, name, text_field)
        case _:
            raise DataError(f"{name}: {format} is not a format of files")
