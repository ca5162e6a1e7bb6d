"""Files and folders are whole or not there."""

import pytest

from transformer_vq.files import folder_written_whole, written_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_within(context, name=None):
    with context as partial:
        (partial / name if name else partial).write_text("half")
        raise KeyError


def test_what_was_interrupted_leaves_nothing_and_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyError):
        fail_within(written_whole(tmp_path / "file"))
    with pytest.raises(KeyError):
        fail_within(folder_written_whole(tmp_path / "folder"), "file")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_what_an_earlier_attempt_left_is_not_taken_over(tmp_path):
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / ".folder.partial" / "old").write_text("from a process that was killed")
    (tmp_path / "folder").mkdir()
    with folder_written_whole(tmp_path / "folder") as partial:
        (partial / "new").write_text("whole")
        assert names(tmp_path / "folder") == []
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["new"]


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("kept")
    with pytest.raises(OSError, match="not empty"), folder_written_whole(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["old"]
