"""Records of JSON Lines, JSON, CSV and TSV files: their text, and records that are rejected."""

import csv
import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from input_helpers import DOCUMENTS, jsonl, read, rejected, write_csv

from transformer_vq.data.sources.json_stream import JsonStream
from transformer_vq.data.sources.readers import ReadCounts
from transformer_vq.data.sources.records import read_csv, read_json, read_jsonl

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=4),
    max_leaves=10,
)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def lines(tmp_path):
    """Write JSON Lines and return the path."""
    return lambda *records: write(
        tmp_path / "x.jsonl",
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in records),
    )


# Fields


def test_the_field_text_is_used_by_default(lines):
    assert read(lines({"title": "a", "text": "b"}, {"text": "c", "title": "d"})) == [b"b", b"c"]


def test_the_only_field_with_text_is_used(lines):
    assert read(lines({"id": 1, "content": "a", "tags": ["b"]})) == [b"a"]


def test_a_given_field_is_used(lines):
    path = lines({"text": "a", "title": "b", "meta": {"body": "c"}, "x.y": "d", "x": {"y": "e"}})
    fields = {"title": b"b", "meta.body": b"c", "x.y": b"d"}
    assert {field: read(path, field=field)[0] for field in fields} == fields


def test_records_may_be_strings(lines):
    assert read(lines('"one"', '"two\\n"')) == [b"one", b"two\n"]


def test_a_missing_field_lists_the_others(lines):
    path = lines({"id": 1, "text": "a", "title": "b"})
    assert rejected(path, field="txt") == (
        f"{path} has no field 'txt' (did you mean 'text'? its fields: id, text, title); "
        "set --data.text-field"
    )
    assert "(its fields: id, text, title)" in rejected(path, field="zzz")
    path = lines({"meta": {"body": "a"}})
    assert "did you mean 'meta.body'?" in rejected(path, field="meta.bod")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"title": "a", "body": "b"}, "has several fields with text (title, body)"),
        ({"id": 1, "n": None}, "has no field with text (id, n)"),
        ({}, "has no field with text (none)"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no field with text (messages)"),
    ],
)
def test_an_ambiguous_field_must_be_chosen(lines, record, problem):
    path = lines(record)
    assert rejected(path) == f"{path} {problem}; choose one with --data.text-field"


def test_a_record_without_the_field_names_its_line(lines):
    path = lines({"text": "a"}, "", {"id": 1, "title": "b"})
    assert rejected(path) == (
        f"{path}, line 3: no field 'text' (its fields: id, title); fix or remove the line"
    )
    path = lines({"a": {"b": "c"}}, {"a": "text"})
    assert f"{path}, line 2: no field 'a.b' (its fields: a)" in rejected(path, field="a.b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(["a"], "a list"), ({"a": "b"}, "an object"), (1.5, "a number"), (True, "true or false")],
)
@pytest.mark.parametrize("before", [[], [{"text": "a"}]])
def test_a_value_that_is_not_text_is_rejected(lines, value, kind, before):
    path = lines(*before, {"text": value})
    message = rejected(path)
    assert message.startswith(
        f"{path}, line {len(before) + 1}: the field 'text' is {kind}, not text; "
    )
    assert "--data.text-field" in message


@pytest.mark.parametrize(
    ("record", "kind"), [("[1]", "a list"), ("1", "a number"), ("null", "null")]
)
def test_a_record_must_be_an_object_or_a_string(lines, record, kind):
    path = lines({"text": "a"}, record)
    assert f"{path}, line 2: {kind} instead of an object" in rejected(path)


def test_empty_documents_are_skipped_and_counted(lines):
    path = lines({"text": "a"}, {"text": ""}, {"text": None}, "", {"text": " "})
    counts = ReadCounts()
    assert read(path, counts=counts) == [b"a", b" "]
    assert counts == ReadCounts(documents=4, empty=2)
    path = lines({"a": {"b": "c"}}, {"a": None}, {"a": {"b": None}})
    assert read(path, field="a.b", counts=counts) == [b"c"]
    assert counts == ReadCounts(documents=7, empty=4)


def test_lone_surrogates_are_replaced(lines):
    path = lines(r'{"text": "a\ud800b\udc00"}', r'{"text": "\ud83d\ude00"}')
    assert read(path) == ["a\ufffdb\ufffd".encode(), "\U0001f600".encode()]


# JSON Lines


def test_blank_lines_and_windows_line_ends_are_accepted(tmp_path):
    path = write(tmp_path / "x.jsonl", b'\r\n{"text": "a"}\r\n\n  \n\t{"text": "b"} ')
    assert read(path) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a"', "invalid JSON ("),
        (b'{"text": "a"} {}', "invalid JSON (Extra data)"),
        (b"plain text", "invalid JSON (Expecting value)"),
        (b'{"text": "\xff"}', "invalid UTF-8 ("),
        (b"[" * 100_000, "invalid JSON (nested too deeply)"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, problem):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' * 1233 + line + b'\n{"text": "b"}\n')
    message = rejected(path)
    assert message.startswith(f"{path}, line 1,234: {problem}")
    assert message.endswith("); fix or remove the line")


def test_text_with_the_name_of_json_lines_is_rejected(tmp_path):
    assert "line 1: invalid JSON" in rejected(write(tmp_path / "x.jsonl", "plain\ntext\n"))


def test_json_lines_need_little_memory():
    lines = (b'{"text": "%s"}\n' % (b"x" * 10_000) for _ in range(2000))
    tracemalloc.start()
    try:
        assert sum(len(x) for x in read_jsonl(lines, "x", None)) == 20_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# JSON


@pytest.mark.parametrize(
    "content",
    [
        [{"text": "a"}, {"text": "b"}],
        ["a", "b"],
        {"data": [{"text": "a"}, {"text": "b"}]},
        {"title": "x", "tags": ["y"], "data": [{"text": "a"}, {"text": "b"}], "n": {"m": [1]}},
        {"data": ["a", "b"], "version": 1},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_records_are_found_in_json(tmp_path, content, indent):
    path = write(tmp_path / "x.json", json.dumps(content, indent=indent))
    assert read(path) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ('{"text": "a", "tags": ["x", "y"], "notes": [{"z": 1}]}', [b"a"]),
        ('{"notes": [{"text": "x"}], "text": "a"}', [b"a"]),
        ('{"id": 1, "content": "a", "tags": ["x"]}', [b"a"]),
        ('"a"', [b"a"]),
        ('{"text": "a"}\n{"text": "b"}\n', [b"a", b"b"]),
        ('{"text":\n"a"}\n{"text": "b"}', [b"a", b"b"]),
        ("[]", []),
        (" ", []),
        ("", []),
    ],
)
def test_single_records_and_sequences_of_records_are_json(tmp_path, content, documents):
    assert read(write(tmp_path / "x.json", content)) == documents


def test_several_arrays_of_records_are_rejected(tmp_path):
    path = write(tmp_path / "x.json", '{"a": [{"text": "x"}], "b": [{"text": "y"}]}')
    assert rejected(path).startswith(f"{path} contains several arrays of records (a, b); ")


@pytest.mark.parametrize(
    ("content", "line", "end"),
    [
        ('[{"text": "a"},\n {"text": "b"}\n', 3, "(the file ends within a value, after 2 records)"),
        ('[{"text": "a"},\n {"text": "b"', 2, ", after 1 records)"),
        ('[{"text": "a"},\n\n oops]', 3, "(Expecting value, after 1 records)"),
        ('[{"text": "a"}\n {"text": "b"}]', 2, "(',' expected, not '{', after 1 records)"),
        ('[{"text": "a"}]\nx', 2, "(more text after the array, after 1 records)"),
        ("plain text", 1, "(Expecting value)"),
        ('{"data": [{"text": "a"},\n', 2, "(the file ends within a value)"),
        ('{"data"}', 1, "(':' expected, not '}')"),
        ("{data: 1}", 1, "(a key in double quotes expected)"),
        ('[{"text": "a"},\n' + "[" * 100_000, 2, "(nested too deeply, after 1 records)"),
        ('[{"text": "a", "n": 1%s}]' % ("0" * 5000), 1, "for integer string conversion: "),
    ],
)
def test_invalid_json_is_rejected(tmp_path, content, line, end):
    path = write(tmp_path / "x.json", content)
    message = rejected(path)
    assert message.startswith(f"{path}, line {line}: invalid JSON (")
    assert message.endswith("; fix the file")
    assert end in message


def test_an_error_in_a_large_json_file_names_its_line(tmp_path):
    records = [f"{i}" + 100 * "x" for i in range(30_000)]
    content = json.dumps(records, indent=0).replace('"20000x', 'oops"20000x')
    path = write(tmp_path / "x.json", content)
    assert len(content) > 3 << 20
    assert rejected(path).startswith(f"{path}, line 20,002: invalid JSON (")


def test_json_with_invalid_utf8_or_wrong_records_is_rejected(tmp_path):
    path = write(tmp_path / "x.json", b'["\xff"]')
    assert f"{path}, line 1: invalid JSON (invalid UTF-8: " in rejected(path)
    path = write(tmp_path / "x.json", '[{"text": "a"}, {"text": 1}]')
    assert f"{path}, record 2: the field 'text' is a number, not text" in rejected(path)


@given(st.lists(values, max_size=6), st.integers(1, 7), st.sampled_from([None, 1]))
def test_a_stream_parses_what_json_parses(records, size, indent):
    data = json.dumps(records, indent=indent, ensure_ascii=False).encode(errors="surrogatepass")
    data = data if b"\xed\xa0" not in data else json.dumps(records, indent=indent).encode()
    chunks = (data[i : i + size] for i in range(0, len(data), size))
    assert list(JsonStream(chunks).array()) == records


def test_an_array_needs_little_memory():
    def chunks():
        yield b"["
        for _ in range(2000):
            yield b'{"text": "%s"}, ' % (b"x" * 10_000)
        yield b'{"text": ""}]'

    def in_object():
        yield b'{"version": 1, "data": '
        yield from chunks()
        yield b', "end": [1, 2]}'

    for source in (chunks, in_object):
        tracemalloc.start()
        try:
            assert sum(len(x) for x in read_json(source, "x", None)) == 20_000_000
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


# CSV and TSV


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
def test_the_delimiter_of_a_csv_file_is_recognized(tmp_path, delimiter):
    write_csv(tmp_path / "x.csv", DOCUMENTS, delimiter)
    assert read(tmp_path / "x.csv") == [x.encode() for x in DOCUMENTS]


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ("text\none\ntwo\n", [b"one", b"two"]),
        ("\ufefftext,id\r\none,1\r\n\r\ntwo,2\r\n", [b"one", b"two"]),
        ('id,"text"\n1,"a ""b"",\nc"\n', [b'a "b",\nc']),
        ("id,content\n1,one\n2,3\n", [b"one", b"3"]),
        ("a;b,text\n1;2,one\n", [b"one"]),
        ("text,id\n", []),
        ("", []),
        ("text\n" + 200_000 * "x" + "\n", [200_000 * b"x"]),
    ],
)
def test_csv_files_are_read(tmp_path, content, documents):
    assert read(write(tmp_path / "x.csv", content)) == documents


def test_empty_cells_are_counted(tmp_path):
    counts = ReadCounts()
    assert read(write(tmp_path / "x.csv", 'id,text\n1,a\n2,\n3,""\n'), counts=counts) == [b"a"]
    assert counts == ReadCounts(documents=3, empty=2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'id,text\n1,"a\nb"\n\n2\n', "line 5: 1 columns instead of 2"),
        (b"id,text\n1,a,b\n", "line 2: 3 columns instead of 2"),
        (b'id,text\n1,"a"b\n', "line 2: invalid quotes"),
        (b'id,text\n1,a\n2,"a\nb\n', "line 3: invalid quotes"),
        (b"id,text\n1,a\n2,\xff\n", "line 3: invalid UTF-8"),
        (b"\xff,text\n1,a\n", "line 1: invalid UTF-8"),
    ],
)
def test_an_invalid_row_is_named(tmp_path, content, problem):
    path = write(tmp_path / "x.csv", content)
    assert rejected(path).startswith(f"{path}, {problem}")


def test_columns_of_csv_files_are_chosen_like_fields(tmp_path):
    path = write(tmp_path / "x.csv", "title,body\na,b\n")
    assert read(path, field="body") == [b"b"]
    assert "has several fields with text (title, body)" in rejected(path)
    assert "did you mean 'body'? its fields: title, body" in rejected(path, field="boddy")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_any_text_survives_csv_and_jsonl(texts):
    file = io.StringIO(newline="")
    rows = csv.writer(file, quoting=csv.QUOTE_ALL)
    rows.writerow(["text"])
    rows.writerows([x] for x in texts)
    expected = [x.encode() for x in texts]
    assert list(read_csv(io.BytesIO(file.getvalue().encode()), "x", "text")) == expected
    assert list(read_jsonl(io.BytesIO(jsonl(texts)), "x", "text")) == expected
