"""Verification of corpora: corrupt ones are prepared again, unchanged files are hashed once."""

import os
import shutil

import pytest
from data_helpers import open_rejection, rejection

from transformer_vq.data import corpus as corpus_module
from transformer_vq.data import verification
from transformer_vq.data.corpus import Corpus, prepare
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.files import file_digest, read_verified_json, write_verified_json

FILES = [f"{split}.{ending}" for split in SPLITS for ending in ("bin", "starts.npy")]
FILES += ["tokenizer.model", "meta.json"]


@pytest.fixture
def hashed(monkeypatch):
    """The names of all files that are hashed."""
    names = []

    def digest(path):
        names.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(verification, "file_digest", digest)
    return names


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete(path):
    path.unlink()


def make_folder(path):
    path.unlink()
    path.mkdir()


def content_of(folder):
    names = set(os.listdir(folder)) - {"verified.json"}
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("damage", [truncate, empty, flip, delete, make_folder])
@pytest.mark.parametrize("name", FILES)
def test_a_corrupt_file_is_rejected_and_prepared_again(books, capsys, name, damage):
    corpus = prepare(books)
    before = content_of(corpus.folder)
    assert set(before) == set(FILES)
    damage(corpus.folder / name)
    open_rejection(corpus.folder)
    capsys.readouterr()
    assert prepare(books) == corpus
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(corpus.folder) in warning
    assert content_of(corpus.folder) == before
    prepare(books)
    assert capsys.readouterr().err == ""
    assert os.listdir(books.cache) == [corpus.folder.name]


@pytest.mark.parametrize("kind", ["empty folder", "file", "broken link", "link"])
def test_anything_else_with_the_name_of_a_corpus_is_replaced(books, tmp_path, capsys, kind):
    corpus = prepare(books)
    before = content_of(corpus.folder)
    shutil.rmtree(corpus.folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    if kind == "empty folder":
        corpus.folder.mkdir()
    elif kind == "file":
        corpus.folder.write_text("a file")
    else:
        corpus.folder.symlink_to(tmp_path / ("other" if kind == "link" else "nowhere"))
    assert prepare(books) == corpus
    assert content_of(corpus.folder) == before
    assert str(corpus.folder) in capsys.readouterr().err
    assert os.listdir(books.cache) == [corpus.folder.name]
    assert (tmp_path / "other" / "mine").read_text() == "mine"


def test_the_size_and_digest_of_every_file_are_recorded(books):
    corpus = prepare(books)
    meta = read_verified_json(corpus.folder / "meta.json")
    assert meta["tokens_sha256"] == corpus.sha256
    assert set(meta["files"]) == set(FILES) - {"meta.json"}
    for name, record in meta["files"].items():
        path = corpus.folder / name
        assert record == {"size": path.stat().st_size, "sha256": file_digest(path)}
    assert corpus.tokenizer_sha256 == corpus.tokenizer().sha256


def test_files_are_hashed_again_only_after_a_change(books, hashed):
    folder = prepare(books).folder
    assert hashed == ["tokenizer.model"]  # the others are hashed while they are written
    hashed.clear()
    prepare(books)
    Corpus.open(folder)
    assert hashed == []
    os.utime(folder / "train.bin", ns=(0, 0))
    prepare(books)
    assert hashed == ["train.bin"]
    prepare(books)
    assert hashed == ["train.bin"]


def test_a_copied_corpus_is_hashed_once(books, hashed, tmp_path):
    copy = shutil.copytree(prepare(books).folder, tmp_path / "copy")
    hashed.clear()
    Corpus.open(copy)
    assert sorted(hashed) == sorted(set(FILES) - {"meta.json"})
    Corpus.open(copy)
    assert len(hashed) == len(FILES) - 1


def test_a_changed_file_with_its_old_time_and_size_is_detected(books):
    folder = prepare(books).folder
    path = folder / "train.bin"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    flip(path)
    os.utime(path, ns=times)
    assert "train.bin" in open_rejection(folder)


@pytest.mark.parametrize("damage", [truncate, empty, flip, delete])
def test_corrupt_stamps_are_rewritten_without_a_warning(books, hashed, capsys, damage):
    corpus = prepare(books)
    hashed.clear()
    damage(corpus.folder / "verified.json")
    assert prepare(books) == corpus
    assert len(hashed) == len(FILES) - 1
    assert prepare(books) == corpus
    assert len(hashed) == len(FILES) - 1
    assert capsys.readouterr().err == ""


def test_stamps_of_other_content_are_not_trusted(books):
    """The record of a file in meta.json has changed since its stamp was written."""
    folder = prepare(books).folder
    meta = read_verified_json(folder / "meta.json")
    meta["files"]["train.bin"]["sha256"] = "0" * 64
    write_verified_json(folder / "meta.json", meta)
    assert "train.bin" in open_rejection(folder)


def test_a_read_only_cache_is_verified_without_stamps(books, hashed, monkeypatch, capsys):
    corpus = prepare(books)
    (corpus.folder / "verified.json").unlink()

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(verification, "write_verified_json", read_only)
    hashed.clear()
    assert prepare(books) == prepare(books) == corpus
    assert len(hashed) == 2 * (len(FILES) - 1)
    assert capsys.readouterr().err == ""


def test_temporary_files_of_killed_stamp_writers_are_deleted(books):
    folder = prepare(books).folder
    (folder / ".verified.json.01234567.partial").write_text("{")
    (folder / "verified.json").unlink()
    prepare(books)
    assert set(os.listdir(folder)) == {*FILES, "verified.json"}


@pytest.mark.parametrize("damage", [delete, truncate])
@pytest.mark.parametrize("name", ["train.bin", "train.starts.npy"])
def test_files_that_change_after_opening_are_rejected(books, name, damage):
    corpus = prepare(books)
    damage(corpus.folder / name)
    assert "delete it" in rejection(corpus.split, "train")


@pytest.mark.parametrize("damage", [delete, flip])
def test_a_tokenizer_that_changes_after_opening_is_rejected(books, damage):
    corpus = prepare(books)
    damage(corpus.folder / "tokenizer.model")
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        corpus.tokenizer()


def test_a_corrupt_corpus_that_cannot_be_moved_is_reported_in_one_line(books, monkeypatch):
    folder = prepare(books).folder
    flip(folder / "train.bin")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(corpus_module, "move_aside", denied)
    assert "Permission denied; delete it or use another" in rejection(prepare, books)
    assert folder.is_dir()


def test_a_corpus_replaced_by_another_process_is_used(books, monkeypatch, capsys):
    corpus = prepare(books)
    flip(corpus.folder / "train.bin")
    lock = corpus_module.locked

    def replaced(folder):
        flip(corpus.folder / "train.bin")  # restores it
        return lock(folder)

    monkeypatch.setattr(corpus_module, "locked", replaced)
    inode = corpus.folder.stat().st_ino
    assert prepare(books) == corpus
    assert corpus.folder.stat().st_ino == inode
    assert capsys.readouterr().err == ""


def test_prepare_rejects_files_that_change_while_they_are_read(books, tmp_path, monkeypatch):
    write = corpus_module.write_corpus

    def change(*arguments):
        write(*arguments)
        (tmp_path / "books" / "train" / "1.txt").write_bytes(b"other words")

    monkeypatch.setattr(corpus_module, "write_corpus", change)
    with pytest.raises(DataError, match="changed while they were read"):
        prepare(books)
    assert os.listdir(books.cache) == []
