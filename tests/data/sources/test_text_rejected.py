"""Paths and formats that are not plain text are rejected in one line."""

import gzip
import json
import os
import zipfile
from pathlib import Path

import pytest
from data_helpers import rejection, text_source

from transformer_vq.data.sources import compression

CONTENT = b"".join(b"%d bottles of beer\n" % i for i in range(100))


def test_devices_pipes_and_broken_links_are_rejected_without_reading_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert "neither a regular file nor a folder" in rejection(text_source, Path("/dev/zero"))
    assert "neither a regular file nor a folder" in rejection(text_source, tmp_path / "pipe")
    assert "is a broken symbolic link" in rejection(text_source, tmp_path / "link")
    assert rejection(text_source, tmp_path / "loop").startswith(f"cannot read {tmp_path}/loop: ")
    assert "does not exist" in rejection(text_source, tmp_path / "pipe" / "below")


def test_entries_that_are_not_regular_files_are_skipped_with_a_warning(tmp_path, capsys):
    (tmp_path / "text").write_bytes(CONTENT)
    assert text_source(tmp_path).files == (tmp_path / "text",)
    assert capsys.readouterr().err == ""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    assert text_source(tmp_path).files == (tmp_path / "text",)
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 entries" in line
    assert str(tmp_path / "link") in line


def test_a_folder_that_cannot_be_listed_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(CONTENT)
    (tmp_path / "private").mkdir()
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert (
        rejection(text_source, tmp_path)
        == f"cannot list the folder {tmp_path}/private: Permission denied"
    )


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_file_without_read_permission_is_rejected(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(CONTENT))

    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(compression, "open", denied, raising=False)
    monkeypatch.setitem(compression._OPENERS, ".gz", denied)
    assert rejection(text_source, path).startswith(f"cannot read {path}: Permission denied")


JSON_LINES = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50)).encode()
STRUCTURED = ["x.jsonl", "x.NDJSON", "x.csv", "x.tsv", "x.parquet", "x.arrow"]


@pytest.mark.parametrize("name", [*STRUCTURED, "x.json", "x.jsonl.gz", "x.csv.zst", "x.json.xz"])
def test_a_structured_file_is_rejected_by_its_suffix(tmp_path, name):
    (tmp_path / name).write_bytes(CONTENT)
    message = rejection(text_source, tmp_path / name)
    assert message.startswith(f"{tmp_path / name} is a ")
    assert ".txt" in message
    assert "--data.path" in message


@pytest.mark.parametrize("name", [*STRUCTURED, "x.jsonl.gz"])
def test_a_folder_with_structured_files_is_rejected(tmp_path, name):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "below" / name).write_bytes(CONTENT)
    assert rejection(text_source, tmp_path).startswith(f"{tmp_path}/below/{name} is a ")


def test_json_files_and_hidden_structured_files_in_a_folder_are_accepted(tmp_path):
    (tmp_path / "package.json").write_bytes(JSON_LINES)
    (tmp_path / ".state.csv").write_bytes(CONTENT)
    assert text_source(tmp_path).files == (tmp_path / "package.json",)


@pytest.mark.parametrize("suffix", ["", ".txt", ".gz", ".zip"])
def test_json_lines_are_rejected_by_content(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    content = b"\n  \n" + JSON_LINES
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inner", content)
    else:
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)
    assert "JSONL" in rejection(text_source, path)


@pytest.mark.parametrize(
    "content",
    [
        CONTENT,
        b'{"one": 1}\n',
        b'{"one": 1}\nand text\n',
        b"{\n}\n",
        b"1\n2\n",
        b"[1]\n[2]\n",
        b"{" * 100_000 + b"\n{}\n",
        b"[" * 100_000 + b"\n{}\n",
        b"\xff\xfe{\n{\n",
    ],
    ids=range(9),
)
def test_other_content_is_accepted_as_text(tmp_path, content):
    (tmp_path / "data").write_bytes(content)
    assert text_source(tmp_path / "data").n_bytes == len(content)
