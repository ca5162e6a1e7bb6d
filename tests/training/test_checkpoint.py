"""States and files: whole or not at all."""

import pytest

from transformer_vq.files import write_text
from transformer_vq.training.checkpoint import (
    CheckpointError,
    read_config,
)


def test_a_file_is_replaced_whole_or_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "first")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {}}', '{"model": {"no": 1}}'])
def test_a_folder_without_a_config_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config"):
        read_config(tmp_path)


def test_a_missing_folder_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder"):
        read_config(tmp_path / "nothing")
