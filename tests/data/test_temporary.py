"""Temporary folders: kept while their process runs, deleted after it was killed."""

import os
import signal
import subprocess
import sys

import pytest
from data_helpers import CONTENT

from transformer_vq.config import DataConfig
from transformer_vq.data import temporary
from transformer_vq.data.corpus import prepare

# Prepares a text file, and blocks while writing until it is killed.
BLOCKED = """
import sys, time
from transformer_vq.config import DataConfig
from transformer_vq.data import corpus as corpus_module

def block(source, dataset, folder, end_of_document):
    (folder / ".vocabulary-x.partial").mkdir()
    (folder / "train.bin").write_bytes(b"incomplete")
    print(folder, flush=True)
    time.sleep(600)

corpus_module.write_corpus = block
corpus_module.prepare(DataConfig(path=sys.argv[1], cache=sys.argv[2]))
"""


def prepare_other(text, tmp_path, name):
    """Prepare another text in the same cache; return the name of its folder."""
    (tmp_path / name).write_bytes(CONTENT)
    return prepare(DataConfig(path=str(tmp_path / name), cache=text.cache)).folder.name


def test_temporary_folders_are_deleted_after_their_process_is_killed(text, tmp_path):
    command = [sys.executable, "-c", BLOCKED, *text.path, text.cache]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            folder = process.stdout.readline().strip()
            first = prepare_other(text, tmp_path, "1")
            (work,) = (name for name in os.listdir(text.cache) if name.endswith(".work"))
            assert set(os.listdir(text.cache)) == {first, os.path.basename(folder), work}
            assert set(os.listdir(folder)) == {".vocabulary-x.partial", "train.bin"}
        finally:
            process.send_signal(signal.SIGKILL)
    assert os.path.isdir(folder)
    second = prepare_other(text, tmp_path, "2")
    assert set(os.listdir(text.cache)) == {first, second, work}


def test_a_temporary_folder_in_use_is_kept(tmp_path):
    corpus = tmp_path / "text-0123456789abcdef"
    other = tmp_path / "text-fedcba9876543210"
    with temporary.locked_atomic_folder(corpus) as live:
        with temporary.locked_atomic_folder(other) as partial:
            (partial / "file").write_text("x")
        assert live.is_dir()
        (live / "file").write_text("y")
    assert sorted(os.listdir(tmp_path)) == [corpus.name, other.name]


def test_files_with_other_names_are_not_deleted(text, tmp_path):
    names = [".mine.partial", ".text-mine.partial", "text-0123456789abcdef.01234567.partial"]
    names += [".text-0123456789abcdef.01234567", ".text-0123456789abcdef.partial"]
    for name in names:
        (tmp_path / "cache" / name).mkdir(parents=True)
    folder = prepare(text).folder
    assert set(os.listdir(text.cache)) == {folder.name, *names}


def test_links_are_deleted_without_their_targets(text, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    link = tmp_path / "cache" / ".text-0123456789abcdef.01234567.partial"
    link.symlink_to(tmp_path / "other")
    folder = prepare(text).folder
    assert os.listdir(text.cache) == [folder.name]
    assert (tmp_path / "other" / "mine").read_text() == "mine"


def test_nothing_is_deleted_on_file_systems_without_locks(text, tmp_path, monkeypatch):
    leftover = tmp_path / "cache" / ".text-0123456789abcdef.01234567.partial"
    leftover.mkdir(parents=True)

    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(temporary.fcntl, "flock", unsupported)
    folder = prepare(text).folder
    assert set(os.listdir(text.cache)) == {folder.name, leftover.name}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_file_modes_follow_the_umask(text, umask):
    before = os.umask(umask)
    try:
        folder = prepare(text).folder
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
