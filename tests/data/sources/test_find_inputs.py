"""Files, folders and patterns as data; formats that are recognized, and files that are rejected."""

import gzip
import json
import os
import tarfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from input_helpers import (
    DOCUMENTS,
    WRITERS,
    jsonl,
    read,
    rejected,
    write_saved_dataset,
    write_table,
)

from transformer_vq.data.sources import compression, inputs
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.inputs import Input, find_inputs, saved_splits
from transformer_vq.data.sources.readers import ReadCounts, read_pieces
from transformer_vq.progress import reporting

TEXT = b"".join(b"%d bottles of beer\n" % i for i in range(100))
LINES = jsonl(["one", "two"])


def write(folder, **files):
    """Write files; _ in a name stands for a dot, and __ for a slash."""
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(*paths, format="auto"):
    return [Path(x.name).name for x in find_inputs([str(path) for path in paths], format)]


def test_every_format_gives_the_documents_of_a_folder_of_text_files(tmp_path):
    for i, text in enumerate(DOCUMENTS):
        write(tmp_path, **{f"folder__{i}_txt": text.encode()})
    expected = [text.encode() for text in DOCUMENTS]
    assert read(tmp_path / "folder") == expected
    for name, writer in WRITERS.items():
        writer(tmp_path / name, DOCUMENTS)
        assert read(tmp_path / name) == expected, name
    write_saved_dataset(tmp_path / "saved", [DOCUMENTS[:3], DOCUMENTS[3:]])
    assert read(tmp_path / "saved") == expected


# Finding files


def test_a_folder_is_read_recursively_in_order_without_hidden_files(tmp_path):
    write(tmp_path, b=b"1", a__z_txt=b"2", a__b_md=b"3", c_gz=gzip.compress(b"4"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"5")
    (tmp_path / ".hidden").write_bytes(b"6")
    assert names(tmp_path) == ["b.md", "z.txt", "b", "c.gz"]
    assert read(tmp_path) == [b"3", b"2", b"1", b"4"]


def test_patterns_match_files_and_folders(tmp_path):
    write(tmp_path, a_txt=b"1", b_md=b"2", x__c_txt=b"3", x__y__d_txt=b"4")
    assert names(tmp_path / "*.txt") == ["a.txt"]
    assert names(tmp_path / "**/*.txt") == ["a.txt", "c.txt", "d.txt"]
    assert names(tmp_path / "[ab].*") == ["a.txt", "b.md"]
    assert names(tmp_path / "x*") == ["c.txt", "d.txt"]
    assert names(tmp_path / "**") == ["a.txt", "b.md", "c.txt", "d.txt"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_bytes(b"1")
    (tmp_path / "a1.txt").write_bytes(b"2")
    assert read(tmp_path / "a[1].txt") == [b"1"]


def test_a_file_that_is_reached_twice_is_used_once(tmp_path):
    write(tmp_path, a_txt=b"1", b_txt=b"2")
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert names(tmp_path / "b.txt", tmp_path, tmp_path / "*.txt") == ["b.txt", "a.txt"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", b"1")
        archive.writestr("b.txt", b"2")
    assert len(find_inputs(2 * [str(tmp_path / "x.zip")])) == 2


def test_a_pattern_without_matches_names_the_option(tmp_path):
    with pytest.raises(DataError, match=r"^--data\.test-path .*\*\.txt: no file matches"):
        find_inputs([str(tmp_path / "*.txt")], option="--data.test-path")


def test_home_folders_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, a_txt=b"1")
    assert read("~/a.txt") == read("~/*.txt") == [b"1"]
    assert "--data.path ~nobody-has-this-name/x: unknown home folder" in rejected(
        "~nobody-has-this-name/x"
    )


def test_paths_that_are_not_files_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    assert "does not exist; give a file, a folder or a pattern as --data.path" in rejected(
        tmp_path / "missing"
    )
    assert "neither a regular file nor a folder" in rejected(tmp_path / "pipe")
    assert "neither a regular file nor a folder" in rejected(tmp_path / "p*")
    assert "is a broken symbolic link" in rejected(tmp_path / "link")
    (tmp_path / "empty").mkdir()
    assert "contains no files" in rejected(tmp_path / "empty")


def test_links_to_folders_and_pipes_in_a_folder_are_skipped_with_a_warning(tmp_path, capsys):
    write(tmp_path, data__a_txt=b"1", other__b_txt=b"2")
    os.mkfifo(tmp_path / "data" / "pipe")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "other")
    assert read(tmp_path / "data") == [b"1"]
    error = capsys.readouterr().err
    assert f"{tmp_path}/data/pipe" in error
    assert f"{tmp_path}/data/linked" in error


def test_checking_many_files_shows_progress(tmp_path, monkeypatch):
    write(tmp_path, a=b"1", b=b"2")
    done = []

    class Reporter:
        @contextmanager
        def progress(self, what, total, unit, done_before=0):
            done.append(f"{total} {unit}")
            yield done.append

    with reporting(Reporter()):
        find_inputs([str(tmp_path)])
        assert done == []
        monkeypatch.setattr(inputs, "_MANY", 2)
        find_inputs([str(tmp_path)])
    assert done == ["2 files", 1, 1]


# Recognizing formats


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


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_byte_order_marks_are_removed_and_utf16_is_converted(
    tmp_path, monkeypatch, encoding, chunk
):
    monkeypatch.setattr(compression, "CHUNK", chunk)
    text = "\u00e4 \U0001f600 text\r\n" * 10
    (tmp_path / "x.txt").write_bytes(text.encode(encoding))
    assert read(tmp_path / "x.txt") == [text.encode()]
    write(tmp_path, y_jsonl=json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    assert read(tmp_path / "y.jsonl") == [text.encode()]


@pytest.mark.parametrize("data", [b"\xff\xfea", b"\xff\xfe\x00\xd8a\x00"])
def test_invalid_utf16_is_rejected(tmp_path, data):
    write(tmp_path, x_txt=data)
    assert rejected(tmp_path / "x.txt").startswith(f"cannot read {tmp_path}/x.txt: 'utf-16")


def test_text_is_read_in_pieces_without_changes(tmp_path):
    data = bytes(range(1, 256)) * 10_000
    write(tmp_path, x_txt=data, y_txt=b"", z_txt=b"\xef\xbb\xbf")
    counts = ReadCounts()
    pieces = list(read_pieces(find_inputs([str(tmp_path)]), counts=counts))
    assert b"".join(piece.data for piece in pieces) == data
    assert max(len(piece.data) for piece in pieces) <= 1 << 20
    assert [piece.starts_document for piece in pieces] == [True, False, False]
    assert counts == ReadCounts(documents=3, empty=2)


# Files that cannot be read


def test_unreadable_files_of_a_folder_are_reported_together(tmp_path):
    write(tmp_path, a_txt=b"1", b_gz=gzip.compress(TEXT)[:12], c_txt=b"2")
    (tmp_path / "d.txt").symlink_to("nowhere")
    assert rejected(tmp_path) == (
        f"cannot read 2 of 4 files, for example {tmp_path}/b.gz (Compressed file ended before the "
        "end-of-stream marker was reached); fix or remove them"
    )


def test_files_that_become_unreadable_are_reported_after_everything_else(tmp_path):
    damaged = gzip.compress(os.urandom(200_000).hex().encode())[:-100_000]
    write(tmp_path, a_txt=b"1", b_gz=damaged, c_txt=b"2", d_txt=b"3")
    found = find_inputs([str(tmp_path)])
    (tmp_path / "c.txt").unlink()
    pieces = []
    with pytest.raises(DataError) as raised:
        pieces += (piece.data for piece in read_pieces(found))
    assert str(raised.value).startswith(f"cannot read 2 of 4 files, for example {tmp_path}/b.gz (")
    assert str(raised.value).endswith("); fix or remove them")


def test_reading_continues_after_an_unreadable_file(tmp_path):
    write(tmp_path, a_txt=b"1", b_txt=b"2", c_txt=b"3")
    found = find_inputs([str(tmp_path)])
    (tmp_path / "b.txt").unlink()
    pieces = read_pieces(found)
    assert [next(pieces).data, next(pieces).data] == [b"1", b"3"]
    with pytest.raises(DataError, match="cannot read 1 of 3 files"):
        next(pieces)


def test_a_file_without_read_permission_is_rejected(tmp_path, monkeypatch):
    write(tmp_path, x_txt=TEXT)
    found = find_inputs([str(tmp_path)])

    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(compression, "open", denied, raising=False)
    with pytest.raises(DataError, match=r"^cannot read .*x\.txt: Permission denied; "):
        list(read_pieces(found))


# Datasets saved to disk


def test_a_saved_dataset_is_read_in_its_order_without_its_other_files(tmp_path):
    folder = tmp_path / "nested" / "saved"
    write_saved_dataset(folder, [["a"], ["b"], ["c"]])
    write_table(folder / "cache-123.arrow", ["cached"], "stream")
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert read(folder) == [b"c", b"b", b"a"]
    assert read(tmp_path / "nested") == [b"c", b"b", b"a"]
    assert read(folder / "*.arrow") == [b"c", b"b", b"a"]
    assert read(folder / "data-00001-of-00003.arrow") == [b"b"]
    assert len(read(folder, format="text")) == 6


def test_splits_of_a_saved_dataset_are_found(tmp_path):
    for name in ("train", "dev", "other"):
        write_saved_dataset(tmp_path / name, [[name]])
    assert saved_splits(tmp_path) is None
    assert saved_splits(tmp_path / "train") is None
    assert saved_splits(tmp_path / "missing") is None
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "dev", "other"]}')
    splits = saved_splits(tmp_path)
    assert splits == {
        "train": tmp_path / "train",
        "validation": tmp_path / "dev",
        "other": tmp_path / "other",
    }
    assert {name: read(path) for name, path in splits.items()}["validation"] == [b"dev"]
    assert read(tmp_path) == [b"dev", b"other", b"train"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"splits": ["../x"]}', '{"splits": ["no"]}'])
def test_an_invalid_list_of_splits_is_rejected(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DataError, match="save the dataset again"):
        saved_splits(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"_data_files": []}',
        '{"_data_files": [{"filename": "../data-00000-of-00001.arrow"}]}',
        '{"_data_files": [{"filename": "missing.arrow"}]}',
        '{"_data_files": [1]}',
    ],
)
def test_an_invalid_saved_dataset_is_rejected(tmp_path, content):
    write_saved_dataset(tmp_path / "x", [["a"]])
    (tmp_path / "x" / "state.json").write_text(content)
    assert "save the dataset again" in rejected(tmp_path / "x")
