"""Files, folders and patterns that a user passes as text data."""

import gzip
import os
import zipfile
from contextlib import contextmanager

import pytest
from input_helpers import (
    DOCUMENTS,
    WRITERS,
    names,
    read,
    rejected,
    write,
    write_saved_dataset,
)

from transformer_vq.data.sources import inputs
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.inputs import find_inputs
from transformer_vq.progress import reporting


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
