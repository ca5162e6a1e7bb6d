"""Paths and formats that are not plain text: rejected in one line, without reading them."""

import gzip
import json
import os
import zipfile
from pathlib import Path

import pytest

from transformer_vq.data.sources import text as module
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.text import ByteFiles, text_files

CONTENT = b"".join(b"%d bottles of beer\n" % i for i in range(100))


def source_of(path):
    return ByteFiles.of(path, text_files(path))


def rejection(path):
    """The one line with which a path is rejected."""
    with pytest.raises(DataError) as raised:
        source_of(path)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_device_a_pipe_and_a_broken_link_are_rejected_without_reading_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert "neither a regular file nor a folder" in rejection(Path("/dev/zero"))
    assert "neither a regular file nor a folder" in rejection(tmp_path / "pipe")
    assert "is a broken symbolic link" in rejection(tmp_path / "link")
    assert rejection(tmp_path / "loop").startswith(f"cannot read {tmp_path}/loop: ")
    assert "does not exist" in rejection(tmp_path / "pipe" / "below")


def test_entries_of_a_folder_that_are_not_files_are_skipped_with_a_warning(tmp_path, capsys):
    (tmp_path / "text").write_bytes(CONTENT)
    assert source_of(tmp_path).files == (tmp_path / "text",)
    assert capsys.readouterr().err == ""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    assert source_of(tmp_path).files == (tmp_path / "text",)
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 entries" in line
    assert str(tmp_path / "link") in line


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(CONTENT)
    (tmp_path / "private").mkdir()
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert rejection(tmp_path) == f"cannot list the folder {tmp_path}/private: Permission denied"


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(CONTENT))

    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "open", denied, raising=False)
    monkeypatch.setitem(module._OPENERS, ".gz", denied)
    assert rejection(path).startswith(f"cannot read {path}: Permission denied")


JSON_LINES = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50)).encode()
STRUCTURED = ["x.jsonl", "x.NDJSON", "x.csv", "x.tsv", "x.parquet", "x.arrow"]


@pytest.mark.parametrize("name", [*STRUCTURED, "x.json", "x.jsonl.gz", "x.csv.zst", "x.json.xz"])
def test_a_structured_file_is_rejected_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(CONTENT)
    message = rejection(tmp_path / name)
    assert message.startswith(f"{tmp_path / name} is a ")
    assert ".txt" in message
    assert "--data.path" in message


@pytest.mark.parametrize("name", [*STRUCTURED, "x.jsonl.gz"])
def test_a_folder_with_structured_files_is_rejected(tmp_path, name):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "below" / name).write_bytes(CONTENT)
    assert rejection(tmp_path).startswith(f"{tmp_path}/below/{name} is a ")


def test_json_in_a_folder_of_sources_and_hidden_structured_files_are_accepted(tmp_path):
    (tmp_path / "package.json").write_bytes(JSON_LINES)
    (tmp_path / ".state.csv").write_bytes(CONTENT)
    assert source_of(tmp_path).files == (tmp_path / "package.json",)


@pytest.mark.parametrize("ending", ["", ".txt", ".gz", ".zip"])
def test_json_lines_are_recognised_by_content(tmp_path, ending):
    path = tmp_path / f"data{ending}"
    content = b"\n  \n" + JSON_LINES
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inner", content)
    else:
        path.write_bytes(gzip.compress(content) if ending == ".gz" else content)
    assert "JSONL" in rejection(path)


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
def test_other_content_is_text(tmp_path, content):
    (tmp_path / "data").write_bytes(content)
    assert source_of(tmp_path / "data").n_bytes == len(content)
