"""Atomic writes leave files complete or absent; verified reads detect corruption."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.files import (
    CorruptFileError,
    atomic_folder,
    atomic_write,
    read_tensors,
    read_verified_json,
    remove_partial_files,
    write_json,
    write_tensors,
    write_verified_json,
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


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(), VALUES, max_size=4))
def test_verified_json_round_trips(tmp_path_factory, value):
    value.pop("sha256", None)
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_verified_json(path, value)
    assert read_verified_json(path) == value


def test_any_change_to_a_verified_file_is_detected(tmp_path):
    write_verified_json(tmp_path / "a.json", {"step": 4, "loss": 0.5, "none": None})
    tensors = {"x": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0), "flag": torch.tensor(1)}
    digest = write_tensors(tmp_path / "b.safetensors", tensors, {"config": "{}"})
    back, metadata = read_tensors(tmp_path / "b.safetensors", digest)
    assert metadata == {"config": "{}"}
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    with pytest.raises(CorruptFileError, match="does not match"):
        read_tensors(tmp_path / "b.safetensors", "0" * 64)
    readers = {"a.json": read_verified_json, "b.safetensors": read_tensors}
    for path, read in ((tmp_path / name, read) for name, read in readers.items()):
        intact, want = path.read_bytes(), read(path)
        n_detected = 0
        for offset in range(len(intact)):
            path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 1]) + intact[offset + 1 :])
            try:
                got = read(path)
            except CorruptFileError:
                n_detected += 1
            else:  # one white space character became another
                assert str(got) == str(want), offset
        assert n_detected > 0.8 * len(intact)
        path.write_bytes(intact[: len(intact) // 2])
        with pytest.raises(CorruptFileError):
            read(path)
        path.unlink()
        with pytest.raises(CorruptFileError, match="does not exist"):
            read(path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"5", b"null", b"\xff\xfe", b"[" * 100_000])
def test_json_without_a_checksum_is_rejected(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"a\.json"):
        read_verified_json(tmp_path / "a.json")


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


def test_files_with_metadata_in_any_order_are_read(tmp_path):
    write_tensors(tmp_path / "x", {"a": torch.ones(3)}, {"one": "1", "two": "2"})
    _, metadata = read_tensors(tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    swapped = content.replace(b'"one":"1"', b"other").replace(b'"two":"2"', b'"one":"1"')
    (tmp_path / "x").write_bytes(swapped.replace(b"other", b'"two":"2"'))
    assert (tmp_path / "x").read_bytes() != content
    assert read_tensors(tmp_path / "x")[1] == metadata == {"one": "1", "two": "2"}


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


def test_an_error_of_a_folder_names_the_requested_one(tmp_path):
    name = "x" * 250  # its temporary name is too long
    with (
        pytest.raises(OSError, match=rf"File name too long: '{tmp_path}/{name}'$"),
        atomic_folder(tmp_path / name),
    ):
        pass


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
