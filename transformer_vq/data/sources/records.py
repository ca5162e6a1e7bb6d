"""Documents from files of records: JSON Lines, JSON, CSV and TSV.

Each reader yields the text of one record after the other, b"" for an empty one. It raises DataError
with the file and the line for records that are not valid.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import IO, Any

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.fields import RecordText, choose_field
from transformer_vq.data.sources.json_stream import JsonError, JsonStream

MAX_FIELD = 1 << 30
_MAX_LINE = 1 << 24
_DELIMITERS = ";|\t"


def read_jsonl(lines: Iterable[bytes], name: str, text_field: str | None) -> Iterator[bytes]:
    """Yield the text of each line, which is a JSON object or string. Skips blank lines."""
    text = RecordText(name, text_field)
    loads = json.loads
    for number, line in enumerate(lines, 1):
        try:
            record = loads(line.decode())
        except (ValueError, RecursionError) as error:
            if not line.strip():
                continue
            raise text.error(number, _problem(error)) from None
        yield text.document(record, number)


def read_json(
    open_chunks: Callable[[], Iterator[bytes]], name: str, text_field: str | None
) -> Iterator[bytes]:
    """Yield the text of each record: of an array, or of the only array of records in an object.

    An object without such an array is a record itself. Records may also follow each other.
    open_chunks: opens the file; it is read twice if it contains an object.
    """
    text = RecordText(name, text_field, "record")
    number = 0
    try:
        for record in _json_records(open_chunks, name, text_field):
            number += 1
            yield text.document(record, number)
    except JsonError as error:
        after = f", after {number:,} records" if number else ""
        raise DataError(
            f"{name}, line {error.line:,}: invalid JSON ({error}{after}); fix the file"
        ) from None


def read_csv(
    lines: Iterable[bytes], name: str, text_field: str | None, delimiter: str = ","
) -> Iterator[bytes]:
    """Yield the text of each row after the header.

    If the header has only one column with commas, another delimiter may be recognized.
    """
    csv.field_size_limit(max(MAX_FIELD, csv.field_size_limit()))
    lines = iter(lines)
    header = next(lines, b"")
    if delimiter == ",":
        delimiter = _delimiter(header)
    rows = _Rows(chain([header], lines), delimiter, name)
    columns = next(rows, [])
    first = next(rows, None)
    if first is None:
        return
    fields = [column.strip() for column in columns]
    with_text = [f for f, value in zip(fields, first, strict=False) if not _is_number(value)]
    index = fields.index(choose_field(name, text_field, fields, with_text))
    for row in chain([first], rows):
        if len(row) != len(fields):
            raise rows.error(
                f"{len(row)} columns instead of {len(fields)} (delimiter {delimiter!r})"
            )
        yield row[index].encode()


def starts_with_json_lines(stream: IO[bytes]) -> bool:
    """Return whether the first two lines that are not blank are JSON objects."""
    lines = (line for line in iter(lambda: stream.readline(_MAX_LINE), b"") if line.strip())
    try:
        head = [json.loads(line.decode()) for line in islice(lines, 2)]
    except (ValueError, RecursionError):
        return False
    return len(head) == 2 and all(isinstance(record, dict) for record in head)


def _json_records(
    open_chunks: Callable[[], Iterator[bytes]], name: str, text_field: str | None
) -> Iterator[Any]:
    stream = JsonStream(open_chunks())
    start = stream.peek()
    if start == "[":
        yield from stream.array()
        stream.end()
        return
    if start != "{":
        yield from stream.values()
        return
    outline = _outline(stream)
    if stream.peek():  # the first of several objects
        yield from JsonStream(open_chunks()).values()
        return
    if (array := _array_of_records(outline, name, text_field)) is None:
        yield outline
        return
    stream = JsonStream(open_chunks())
    for key in stream.object_keys():
        if key == array:
            yield from stream.array()
            return
        stream.value()


def _outline(stream: JsonStream) -> dict[str, Any]:
    """Read an object; keep only the first element of its arrays."""
    outline: dict[str, Any] = {}
    for key in stream.object_keys():
        if stream.peek() != "[":
            outline[key] = stream.value()
            continue
        elements = stream.array()
        outline[key] = list(islice(elements, 1))
        for _ in elements:
            pass
    return outline


def _array_of_records(outline: dict[str, Any], name: str, text_field: str | None) -> str | None:
    """Return the array in an object that holds the records; None if the object is a record."""
    if isinstance(outline.get("text" if text_field is None else text_field), str):
        return None
    arrays = {key: value[0] for key, value in outline.items() if isinstance(value, list) and value}
    found = [key for key, first in arrays.items() if isinstance(first, dict)]
    if not found and not any(isinstance(value, str) for value in outline.values()):
        found = [key for key, first in arrays.items() if isinstance(first, str)]
    if len(found) > 1:
        raise DataError(
            f"{name} contains several arrays of records ({', '.join(found)}); "
            "keep one of them, or convert the file to JSON Lines"
        )
    return found[0] if found else None


class _Rows:
    """The rows of a CSV file that are not blank; knows in which line the last one starts."""

    def __init__(self, lines: Iterable[bytes], delimiter: str, name: str) -> None:
        # strict: a quote that is never closed must not swallow the rest of the file.
        self._reader = csv.reader(map(bytes.decode, lines), delimiter=delimiter, strict=True)
        self._name = name
        self._line = 1

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> list[str]:
        row: list[str] = []
        while not row:
            self._line = self._reader.line_num + 1
            try:
                row = next(self._reader)
            except UnicodeDecodeError as error:
                self._line = self._reader.line_num + 1
                raise self.error(_problem(error), "convert the file to UTF-8") from None
            except csv.Error as error:
                raise self.error(f"invalid quotes or line ends ({error})") from None
        return row

    def error(self, problem: str, fix: str = "fix or remove the row") -> DataError:
        return DataError(f"{self._name}, line {self._line:,}: {problem}; {fix}")


def _delimiter(header: bytes) -> str:
    """Return the delimiter of a CSV file: a comma, unless another one divides the header."""
    text = header.decode(errors="replace").strip()
    widths = {x: len(next(csv.reader([text], delimiter=x), [])) for x in ("," + _DELIMITERS)}
    return "," if widths[","] > 1 else max(widths, key=widths.__getitem__)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return not value.strip()
    return True


def _problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 ({error.reason})"
    if isinstance(error, RecursionError):
        return "invalid JSON (nested too deeply)"
    return f"invalid JSON ({getattr(error, 'msg', error)})"
