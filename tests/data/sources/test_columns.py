"""Text columns of Parquet and Arrow files, and files that are rejected."""

import gzip
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import DOCUMENTS, read, rejected, write_table

from transformer_vq.data.sources import columns
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.readers import ReadCounts
from transformer_vq.errors import MissingExtraError

KINDS = ("parquet", "arrow", "stream")
EXPECTED = [x.encode() for x in DOCUMENTS]
TYPES = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()),
    *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string())),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type", TYPES, ids=str)
def test_text_columns_of_all_types_are_read(tmp_path, kind, type):
    texts = pa.array([*DOCUMENTS, None, ""])
    if pa.types.is_dictionary(type):
        texts = texts.dictionary_encode()
    write_table(tmp_path / "x", texts.cast(type), kind)
    counts = ReadCounts()
    assert read(tmp_path / "x", counts=counts) == EXPECTED
    assert counts == ReadCounts(documents=6, empty=2)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_chosen_like_fields(tmp_path, kind):
    path = tmp_path / "x"
    more = {"title": ["t"], "meta": [{"body": "b", "n": 1}], "chat": [[{"role": "user"}]]}
    write_table(path, ["a"], kind, **more)
    assert read(path) == [b"a"]
    assert read(path, field="title") == [b"t"]
    assert read(path, field="meta.body") == [b"b"]
    assert f"{path} has no field 'titel' (did you mean 'title'?" in rejected(path, field="titel")
    for field in ("chat", "id", "meta"):
        message = rejected(path, field=field)
        assert message.startswith(f"{path}: the column {field!r} has the type ")
        assert message.endswith("choose a column of text with --data.text-field")


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_with_dots_is_not_a_path_if_such_a_column_exists(tmp_path, kind):
    write_table(tmp_path / "x", ["a"], kind, **{"b.c": ["d"], "b": [{"c": "e"}]})
    assert read(tmp_path / "x", field="b.c") == [b"d"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind):
    write_table(tmp_path / "x", ["a"], kind)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pip install pyarrow"):
        read(tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_column_with_strings_is_used(tmp_path, kind):
    for name, columns_, expected in [
        ("one", {"content": ["a"], "hash": [b"x"], "n": [1]}, b"a"),
        ("binary", {"content": [b"a"], "n": [1]}, b"a"),
    ]:
        table = pa.table(columns_)
        path = tmp_path / name
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
                writer.write_table(table)
        assert read(path) == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_converted_a_few_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(columns, "_ROWS", 2)
    write_table(tmp_path / "x", 5 * DOCUMENTS, kind)
    sizes = []
    real = columns._documents

    def documents(pa, batch, path):
        sizes.append(batch.num_rows)
        return real(pa, batch, path)

    monkeypatch.setattr(columns, "_documents", documents)
    assert read(tmp_path / "x") == 5 * EXPECTED
    assert max(sizes) <= 2


def test_only_the_text_column_of_a_parquet_file_is_read(tmp_path, monkeypatch):
    write_table(tmp_path / "x.parquet", DOCUMENTS, "parquet", other=DOCUMENTS)
    names = []
    real = columns._documents

    def documents(pa, batch, path):
        names.extend(batch.schema.names)
        return real(pa, batch, path)

    monkeypatch.setattr(columns, "_documents", documents)
    read(tmp_path / "x.parquet")
    assert set(names) == {"text"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_rows_has_no_documents(tmp_path, kind):
    write_table(tmp_path / "x", pa.array([], pa.string()), kind)
    assert read(tmp_path / "x") == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_an_incomplete_file_is_rejected(tmp_path, kind, share, suffix):
    write_table(tmp_path / "x", 100 * DOCUMENTS, kind)
    data = (tmp_path / "x").read_bytes()
    data = data[: int(share * len(data))]
    path = tmp_path / f"x.{'parquet' if kind == 'parquet' else 'arrow'}{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    message = rejected(path)
    name = "Parquet" if kind == "parquet" else "Arrow"
    assert message.startswith(f"{path} is not a complete {name} file (")
    assert message.endswith("); copy or download it again")


@pytest.mark.parametrize("kind", KINDS)
def test_corrupt_tables_are_rejected_in_one_line_or_read(tmp_path, kind):
    """No error of the library escapes, and it does not crash."""
    path = tmp_path / "x"
    write_table(path, DOCUMENTS, kind)
    data = path.read_bytes()
    messages = []
    for offset in range(8, len(data) - 8, 5):
        path.write_bytes(data[:offset] + b"\xff\xff\xff" + data[offset + 3 :])
        try:
            read(path)
        except DataError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def test_an_empty_file_is_not_a_table(tmp_path):
    for name in ("x.parquet", "x.arrow"):
        (tmp_path / name).write_bytes(b"")
        assert f"{name} is not a" in rejected(tmp_path / name)
        assert f"{name} is not a" in rejected(tmp_path / name, format=name[2:])
