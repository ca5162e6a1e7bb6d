"""Documents from the text column of Parquet and Arrow files. Only that column is read."""

from __future__ import annotations

import io
import mmap
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import CHUNK
from transformer_vq.data.sources.fields import choose_field
from transformer_vq.data.sources.paths import error_reason
from transformer_vq.errors import missing_extra

_ROWS = 128  # converted at once: documents may be books
_ARROW_FILE = b"ARROW1"  # a stream has no mark
_STRINGS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "binary_view")


def read_parquet(file: IO[bytes], name: str, text_field: str | None) -> Iterator[bytes]:
    """Yield the text of each row of a Parquet file, b"" for null. file: seekable."""
    pa = _pyarrow("a Parquet file")
    import pyarrow.parquet as pq

    with _complete(name, "Parquet"):
        # A buffer, so that row groups are not loaded as a whole.
        table = pq.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
        path = _text_column(pa, table.schema_arrow, name, text_field)
        batches = table.iter_batches(_ROWS, columns=[".".join(path)], use_threads=False)
        for batch in batches:
            yield from _documents(pa, batch, path)


def read_arrow(file: IO[bytes], name: str, text_field: str | None) -> Iterator[bytes]:
    """Yield the text of each row of an Arrow IPC file or stream, b"" for null. file: seekable."""
    pa = _pyarrow("an Arrow file")
    with _complete(name, "Arrow"):
        # Mapped into memory, so that the other columns are not read.
        data = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if data[: len(_ARROW_FILE)].equals(pa.py_buffer(_ARROW_FILE)):
            table = pa.ipc.open_file(data)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            batches = table = pa.ipc.open_stream(data)
        path = _text_column(pa, table.schema, name, text_field)
        for batch in batches:
            # The format has no checksums: reading corrupt lengths would crash the process.
            batch.column(path[0]).validate(full=True)
            for start in range(0, batch.num_rows, _ROWS):
                yield from _documents(pa, batch.slice(start, _ROWS), path)


@contextmanager
def seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a file with the same bytes in which readers can jump; a temporary one if necessary."""
    if type(stream) is io.BufferedReader:
        yield stream
        return
    with tempfile.TemporaryFile() as file:
        shutil.copyfileobj(stream, file, CHUNK)
        file.seek(0)
        yield file


@contextmanager
def _complete(name: str, kind: str) -> Iterator[None]:
    """Raise DataError if a file cannot be read to the end."""
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{name} is not a complete {kind} file ({error_reason(error)}); "
            "copy or download it again"
        ) from error


def _text_column(pa: Any, schema: Any, name: str, text_field: str | None) -> list[str]:
    """Return the path of the text column: its name, followed by names of nested fields."""
    types = _types(pa, schema)
    with_text = [x for x in schema.names if types[x] in _STRINGS]
    with_text = with_text or [x for x in schema.names if types[x] in _BINARIES]
    field = choose_field(name, text_field, list(types), with_text)
    if types[field] not in (*_STRINGS, *_BINARIES):
        raise DataError(
            f"{name}: the column {field!r} has the type {types[field]}, not text; choose a column "
            "of text with --data.text-field"
        )
    return [field] if field in schema.names else field.split(".")


def _types(pa: Any, fields: Any, prefix: str = "") -> dict[str, str]:
    """Return the types of columns, and of the fields of structs by their dotted paths."""
    types = {prefix + field.name: _value_type(pa, field.type) for field in fields}
    for field in fields:
        if pa.types.is_struct(field.type):
            types |= _types(pa, list(field.type), f"{prefix}{field.name}.")
    return types


def _value_type(pa: Any, type: Any) -> str:
    return str(type.value_type if pa.types.is_dictionary(type) else type)


def _documents(pa: Any, batch: Any, path: list[str]) -> Iterator[bytes]:
    import pyarrow.compute as pc

    column = batch.column(path[0])
    for field in path[1:]:
        column = pc.struct_field(column, field)
    # Strings are stored as UTF-8, so they are not decoded.
    for text in column.cast(pa.large_binary()).to_pylist():
        yield text or b""


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_extra(what, "pyarrow") from None
    return pyarrow
