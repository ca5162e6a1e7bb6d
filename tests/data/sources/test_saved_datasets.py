"""Hugging Face datasets saved to disk: their shards and splits."""

import json

import pytest
from input_helpers import (
    read,
    rejected,
    write_saved_dataset,
    write_table,
)

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.inputs import saved_splits


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
