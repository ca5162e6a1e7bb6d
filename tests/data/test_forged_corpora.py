"""Corpora with valid checksums and invalid content: they are rejected, never misread."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import open_rejection, rejection

from transformer_vq.data import verification
from transformer_vq.data.corpus import Corpus, prepare
from transformer_vq.data.sources.base import DataError
from transformer_vq.files import read_verified_json, write_verified_json


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "5", "null", '"text"', "{}", "{", "[" * 2000, '{"sha256": 1}', "\udcff"],
    ids=range(9),
)
def test_meta_that_is_not_a_valid_object_is_rejected_in_one_line(books, text):
    folder = prepare(books).folder
    (folder / "meta.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    open_rejection(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": None},
        {"splits": None},
        {"splits": {}},
        {"files": []},
        {"files": {}},
        {"files": {"train.bin": 1, "test.bin": 1, "validation.bin": 1}},
        {"vocab_size": "many"},
        {"vocab_size": 100},
        {"bos": -1},
        {"bos": 300},
        {"bos": None},
    ],
    ids=str,
)
def test_meta_with_invalid_values_is_rejected_despite_its_checksum(books, changes):
    folder = prepare(books).folder
    meta = read_verified_json(folder / "meta.json")
    write_verified_json(folder / "meta.json", meta | changes)
    open_rejection(folder)


def test_meta_with_a_missing_field_is_rejected_in_one_line(books):
    folder = prepare(books).folder
    meta = read_verified_json(folder / "meta.json")
    for field in meta:
        rest = {name: value for name, value in meta.items() if name != field}
        write_verified_json(folder / "meta.json", rest)
        open_rejection(folder)


def test_a_folder_without_a_corpus_is_rejected_in_one_line(tmp_path):
    open_rejection(tmp_path)
    open_rejection(tmp_path / "absent")


def forge(folder, name, data):
    """Write a file, with a matching record and stamp."""
    (folder / name).write_bytes(data)
    meta = read_verified_json(folder / "meta.json")
    meta["files"][name] = verification.record_of(folder / name)
    write_verified_json(folder / "meta.json", meta)
    verification.mark_verified(folder, meta["files"])


def npy(array, folder):
    np.save(folder / "x.npy", array)
    return (folder / "x.npy").read_bytes()


@pytest.mark.parametrize(
    "starts",
    [
        [0, 10**9],
        [1, 2],
        [0, 0],
        [5, 0],
        [0],
        [0, 1, 2],
        [0.0, 1.0],
        [[0, 1]],
        [0, -1],
        [],
    ],
    ids=str,
)
def test_invalid_document_starts_are_rejected_despite_valid_hashes(books, tmp_path, starts):
    corpus = prepare(books)
    forge(corpus.folder, "test.starts.npy", npy(np.array(starts), tmp_path))
    corpus = Corpus.open(corpus.folder)
    corpus.split("train")
    assert "delete it" in rejection(corpus.split, "test")


@pytest.mark.parametrize("offset", range(0, 118, 7))
def test_a_mutated_array_header_is_rejected_or_has_no_effect(books, offset):
    corpus = prepare(books)
    starts = corpus.split("test").starts.tolist()
    data = bytearray((corpus.folder / "test.starts.npy").read_bytes())
    for value in (0, ord("("), ord("9"), 255):
        data[offset] = value
        forge(corpus.folder, "test.starts.npy", data)
        message = ""
        try:
            assert Corpus.open(corpus.folder).split("test").starts.tolist() == starts
        except DataError as error:
            message = str(error)
        assert "\n" not in message


def test_token_files_of_the_wrong_size_are_rejected_despite_valid_hashes(books):
    folder = prepare(books).folder
    forge(folder, "train.bin", (folder / "train.bin").read_bytes() + b"\0\0")
    open_rejection(folder)


def test_a_corpus_in_an_older_format_is_rejected(books):
    folder = prepare(books).folder
    meta = read_verified_json(folder / "meta.json")
    fields = ("dataset", "vocab_size", "bos", "splits")
    old = {name: meta[name] for name in fields} | {"sha256": meta["tokens_sha256"]}
    (folder / "meta.json").write_text(json.dumps(old))
    open_rejection(folder)


@pytest.mark.parametrize("option", ["path", "tokenizer", "cache"])
def test_an_unknown_home_folder_is_rejected_in_one_line(books, option):
    with pytest.raises(DataError, match=f"--data.{option} ~no-such-user/x: "):
        prepare(replace(books, **{option: "~no-such-user/x"}))
