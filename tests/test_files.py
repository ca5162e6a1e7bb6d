"""Atomic writes leave files complete or absent; verified reads detect corruption."""

import os
import time

import pytest
import torch

from transformer_vq import files
from transformer_vq.files import (
    CorruptFileError,
    atomic_folder,
    atomic_write,
    read_tensors,
    remove_partial_files,
    write_json,
    write_tensors,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_within(context, name=None):
    with context as partial:
        (partial / name if name else partial).write_text("incomplete")
        raise KeyError


def test_an_interrupted_write_changes_nothing_and_leaves_no_files(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyError):
        fail_within(atomic_write(tmp_path / "file"))
    with pytest.raises(KeyError):
        fail_within(atomic_folder(tmp_path / "folder"), "file")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_temporary_files_are_deleted_by_remove_partial_files_only(tmp_path):
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / ".folder.partial" / "old").write_text("a file of the user")
    (tmp_path / ".file.0123abcd.partial").write_text("from a process that was killed")
    (tmp_path / "folder").mkdir()
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "new").write_text("complete")
        assert names(tmp_path / "folder") == []
    assert names(tmp_path) == [".file.0123abcd.partial", ".folder.partial", "folder"]
    assert names(tmp_path / "folder") == ["new"]
    remove_partial_files(tmp_path)
    assert names(tmp_path) == [".folder.partial", "folder"]


def test_atomic_write_does_not_write_through_a_link(tmp_path, monkeypatch):
    """A link with the name of the temporary file is not followed, even if the name was guessed."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / ".out.json.00000000.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "out.json", {"a": 1})
    assert precious.read_text() == "kept"
    assert names(tmp_path) == [".out.json.00000000.partial", "precious"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_file_modes_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", {})
        write_tensors(tmp_path / "b.safetensors", {"x": torch.zeros(3)})
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    files = 0o666 & ~umask
    assert modes == {"a.json": files, "b.safetensors": files, "folder": 0o777 & ~umask}


def test_a_write_error_names_the_requested_file(tmp_path):
    with pytest.raises(OSError, match=r"missing/out\.json'$"):
        write_json(tmp_path / "missing" / "out.json", {})


def test_any_change_to_a_tensor_file_is_detected(tmp_path):
    path = tmp_path / "b.safetensors"
    tensors = {"x": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0), "flag": torch.tensor(1)}
    write_tensors(path, tensors, {"config": "{}"})
    back, metadata = read_tensors(path)
    assert metadata == {"config": "{}"}
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    intact = path.read_bytes()
    for offset in range(len(intact)):
        path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 1]) + intact[offset + 1 :])
        try:
            got = read_tensors(path)
        except CorruptFileError:
            continue
        assert str(got) == str((back, metadata)), offset  # white space became another one
    path.write_bytes(intact[: len(intact) // 2])
    with pytest.raises(CorruptFileError):
        read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"5", b"null", b"\xff\xfe", b"[" * 100_000])
def test_json_that_is_not_an_object_is_rejected(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"a\.json"):
        files.read_object(tmp_path / "a.json")


def test_equal_tensors_and_metadata_give_equal_files(tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.zeros(2)}
    metadata = {f"key {i}": f'quoted "\\", \n, \x01, \u00e9\U0001f600 {i}' for i in range(6)}
    for name in "xyz":
        metadata = dict(reversed(metadata.items()))
        write_tensors(tmp_path / name, tensors, metadata)
    assert len({(tmp_path / name).read_bytes() for name in "xyz"}) == 1
    back, found = read_tensors(tmp_path / "x")
    assert found == metadata
    assert all(torch.equal(back[name], x) for name, x in tensors.items())


def test_files_are_flushed_before_the_rename_and_folders_after_it(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        events.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def record_replace(source, target):
        events.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr("os.fsync", record_sync)
    monkeypatch.setattr("os.replace", record_replace)
    write_json(tmp_path / "a.json", {})
    parent, file = (path.stat().st_ino for path in (tmp_path, tmp_path / "a.json"))
    assert events == [("sync", file), ("replace", file), ("sync", parent)]

    events.clear()
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "b").write_text("written by a library")
    folder = tmp_path / "folder"
    inside, of_folder = (folder / "b").stat().st_ino, folder.stat().st_ino
    assert events == [
        *(("sync", inside), ("sync", of_folder), ("replace", of_folder), ("sync", parent))
    ]


def test_atomic_folder_does_not_replace_a_folder_with_content(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("kept")
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["old"]


def test_tensors_are_read_into_aligned_memory(tmp_path):
    """Matrix products round by alignment, so exact resume depends on it."""
    write_tensors(tmp_path / "x", {f"{n}": torch.ones(n) for n in (1, 3, 5, 17)})
    tensors, _ = read_tensors(tmp_path / "x")
    assert [x.data_ptr() % 64 for x in tensors.values()] == [0] * 4


def test_manifest_finds_every_changed_missing_and_unlisted_file(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (tmp_path / name).write_text(name)
    files.write_manifest(tmp_path)
    assert list(files.read_manifest(tmp_path)) == ["a", "b", "sub/c"]
    assert files.check_manifest(tmp_path, "do this") == []
    (tmp_path / "a").write_text("A")
    assert files.check_manifest(tmp_path, "do this", editable=["a"]) == ["a"]
    with pytest.raises(CorruptFileError, match=r"a is corrupt: its.*; do this"):
        files.check_manifest(tmp_path, "do this")
    (tmp_path / "sub" / "c").unlink()
    (tmp_path / "new").touch()
    assert files.changed_files(tmp_path) == ["a", "sub/c"]
    assert files.changed_files(tmp_path, ["b", "new"]) == ["new"]
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"manifest.json is not a manifest; do this"):
        files.check_manifest(tmp_path, "do this")


def test_large_files_are_hashed_only_after_a_change(tmp_path, monkeypatch):
    hashed = []
    digest_of = files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda p: (hashed.append(p.name), digest_of(p))[1])

    def check():
        time.sleep(0.02)  # longer than the resolution of file times
        hashed.clear()
        files.check_large_files(tmp_path, "do this")
        return hashed

    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files.write_manifest(tmp_path)
    assert check() == ["a", "b"]
    assert check() == []
    (tmp_path / "b").write_text("b")  # the same content at another time
    assert check() == ["a", "b"]
    assert check() == []
    (tmp_path / "b").write_text("c")
    os.utime(tmp_path / "b", (0, 0))
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=r"b is corrupt.*; do this"):
            check()
    assert names(tmp_path) == [".checked", "a", "b", "manifest.json"]
