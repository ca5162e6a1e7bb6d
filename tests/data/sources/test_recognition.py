"""Formats are recognized by name and content; other data is rejected."""

import gzip
import tarfile
import zipfile
from pathlib import Path

import pytest
from input_helpers import (
    DOCUMENTS,
    LINES,
    TEXT,
    WRITERS,
    jsonl,
    read,
    rejected,
    write,
    write_table,
)

from transformer_vq.data.sources.inputs import Input, find_inputs


@pytest.mark.parametrize(
    ("name", "data", "format"),
    [
        ("a.txt", TEXT, "text"),
        ("a", TEXT, "text"),
        ("a.py", TEXT, "text"),
        ("a.unknown", TEXT, "text"),
        ("a.txt", b"", "text"),
        ("a.txt", b'{"one": 1}\n', "text"),
        ("a.txt", b'{"one": 1}\nand text\n', "text"),
        ("a.txt", b"{\n}\n", "text"),
        ("a.txt", b"[1]\n[2]\n", "text"),
        ("a", b"{" * 100_000 + b"\n{}\n", "text"),
        ("a", b"[" * 100_000 + b"\n{}\n", "text"),
        ("a.txt", b"\n  \n" + LINES, "jsonl"),
        ("a", LINES, "jsonl"),
        ("a", b"\xef\xbb\xbf" + LINES, "jsonl"),
        ("a", LINES.decode().encode("utf-16"), "jsonl"),
        ("a.csv", LINES, "jsonl"),
        ("a", jsonl(["x" * 100_000, "y"]), "jsonl"),
        ("a.jsonl", b'"text"\n', "jsonl"),
        ("a.NDJSON", LINES, "jsonl"),
        ("a.json", LINES, "json"),
        ("a.json", b"[]", "json"),
        ("a.csv", TEXT, "csv"),
        ("a.TSV", TEXT, "tsv"),
        ("a.tab", TEXT, "tsv"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_formats_are_recognized_by_name_and_content(tmp_path, name, data, format, suffix):
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(data) if suffix else data)
    assert find_inputs([str(path)]) == [Input(path, format)]


@pytest.mark.parametrize("name", ["x", "x.txt", "x.jsonl", "x.csv", "x.arrow", "x.parquet"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_tables_are_recognized_by_content(tmp_path, name, kind):
    write_table(tmp_path / name, DOCUMENTS, kind)
    assert read(tmp_path / name) == [x.encode() for x in DOCUMENTS]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.txt", b"text\0text", "binary data"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary data"),
        ("a.txt", b"x" * 60_000 + b"\0", "binary data"),
        ("a.pdf", b"%PDF-1.7\n", "a PDF document"),
        ("a.jsonl", b"\x7fELF\0\0", "binary data"),
        ("a.csv", b"a,b\n\0,\0\n", "binary data"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_binary_data_is_not_text(tmp_path, name, data, kind, suffix):
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(data) if suffix else data)
    assert rejected(path).startswith(f"{path} is not text ({kind}); ")
    assert read(path, format="text") == [data]


def test_archives_and_documents_are_not_text(tmp_path):
    write(tmp_path, a_txt=TEXT)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt")
    assert "is not text (a tar archive, which must be extracted)" in rejected(tmp_path / "x.tar.gz")
    with zipfile.ZipFile(tmp_path / "x.docx", "w") as archive:
        archive.writestr("[Content_Types].xml", b"<xml/>")
        archive.writestr("word/document.xml", b"<xml/>")
    assert "x.docx is a document or a program, not text" in rejected(tmp_path / "x.docx")


def test_binary_files_among_text_files_are_counted(tmp_path):
    write(tmp_path, a_txt=TEXT, b_png=b"\0", c_png=b"\0", d_jsonl=LINES)
    message = rejected(tmp_path)
    assert message.startswith(
        f"{tmp_path}: 2 of 4 files are not text, for example {tmp_path}/b.png"
    )


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_name_that_promises_a_table_is_checked(tmp_path, name):
    (tmp_path / name).write_bytes(TEXT)
    kind = {"x.parquet": "a Parquet", "x.arrow": "an Arrow"}[name]
    assert rejected(tmp_path / name).startswith(f"{tmp_path / name} is not {kind} file; ")
    assert read(tmp_path / name, format="text") == [TEXT]


@pytest.mark.parametrize("other", ["b.jsonl", "b.json", "b.csv", "b.tsv", "b.parquet", "b.arrow"])
def test_a_folder_with_text_and_structured_files_is_rejected(tmp_path, other):
    write(tmp_path, a_txt=TEXT, c_txt=TEXT)
    writer = WRITERS[f"x{Path(other).suffix}"]
    writer(tmp_path / other, DOCUMENTS)
    message = rejected(tmp_path)
    assert message.startswith(f"{tmp_path} contains different formats: 2 text files (for example ")
    assert f"1 {Path(other).suffix[1:]} file (for example {tmp_path / other})".lower() in (
        message.lower()
    )
    assert "--data.format text" in message
    assert f"'{tmp_path}/*{Path(other).suffix}'" in message
    assert message.split(": ", 1)[1] == rejected(tmp_path / "*").split(": ", 1)[1]
    content = (tmp_path / other).read_bytes()
    assert read(tmp_path, format="text") == [TEXT, content, TEXT]


def test_several_paths_may_have_different_formats(tmp_path):
    write(tmp_path, a_txt=b"text", b_jsonl=LINES)
    WRITERS["x.parquet"](tmp_path / "c.parquet", ["three"])
    paths = [tmp_path / name for name in ("c.parquet", "a.txt", "b.jsonl")]
    assert read(*paths) == [b"three", b"text", b"one", b"two"]


def test_a_given_format_overrides_recognition(tmp_path):
    write(tmp_path, data__a_txt=b"id,text\n1,one\n", data__b=b"text;id\ntwo;2\n")
    assert read(tmp_path / "data", format="csv") == [b"one", b"two"]
    write(tmp_path, a_json=LINES, b_jsonl=b'{"text": "three"}')
    assert read(tmp_path / "*.json*", format="jsonl") == [b"one", b"two", b"three"]
    write(tmp_path, x_txt=b'{"text": "one"}\nplain\n')
    assert rejected(tmp_path / "x.txt", format="jsonl").startswith(f"{tmp_path}/x.txt, line 2: ")
    write(tmp_path, y_txt=LINES)
    assert find_inputs([str(tmp_path / "y.txt")], "csv") == [Input(tmp_path / "y.txt", "csv")]
    for format in ("parquet", "arrow"):
        assert "x.txt is not a" in rejected(tmp_path / "x.txt", format=format)


# Plain text
