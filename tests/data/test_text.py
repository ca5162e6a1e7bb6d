"""Text files and records: formats, compression, fields, and data that cannot be read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import rejection

from transformer_vq.config import DataConfig
from transformer_vq.data import text
from transformer_vq.data.text import find_inputs, python_sources, store_stdin
from transformer_vq.errors import MissingExtraError

DOCUMENTS = [
    'first, "quoted"\nline; two\n',
    "zweites\tDokument \u00fc\U0001f600",
    "a|b",
    " x ",
    "NA",
    "",
]
TABLE = pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
TEXT = b"".join(b"%d bottles of beer\n" % i for i in range(100))


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": i, field: x}) + "\n" for i, x in enumerate(texts)).encode()


def write_csv(path, delimiter):
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["id", "text"])
        rows.writerows(enumerate(DOCUMENTS))


def write_arrow(path, new):
    with pa.OSFile(str(path), "wb") as file, new(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=3)


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for i, data in enumerate(members):
            archive.writestr(f"folder/{i}", data)
    return file.getvalue()


WRITERS = {
    "x.jsonl": lambda path: path.write_bytes(jsonl(DOCUMENTS)),
    "x.ndjson": lambda path: path.write_bytes(jsonl(DOCUMENTS, "body")),
    "strings.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n"),
    "x.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(jsonl(DOCUMENTS))),
    "x.json": lambda path: path.write_text(json.dumps([{"text": x} for x in DOCUMENTS])),
    "x.csv": lambda path: write_csv(path, ","),
    "x.tsv": lambda path: write_csv(path, "\t"),
    "x.parquet": lambda path: pq.write_table(TABLE, path),
    "x.arrow": lambda path: write_arrow(path, pa.ipc.new_file),
    "stream.arrow": lambda path: write_arrow(path, pa.ipc.new_stream),
    "[x].parquet": lambda path: pq.write_table(TABLE, path),
}
COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".zip": zipped,
}


def read(*paths, **options):
    """Return the documents of paths, as bytes."""
    found = []
    for item in find_inputs([str(path) for path in paths], **options):
        with text.reading(item.path):
            found += [b"".join(pieces) for pieces in item.read()]
    return found


def rejected(*paths, **options):
    return rejection(lambda: read(*paths, **options))


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == [document.encode() for document in DOCUMENTS]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_are_decompressed_or_rejected(tmp_path, monkeypatch, suffix):
    path, compress = tmp_path / f"x.txt{suffix}", COMPRESSORS[suffix]
    monkeypatch.setattr(text, "CHUNK", 100)
    path.write_bytes(compress(TEXT))
    assert read(path) == [TEXT]
    if suffix == ".zip":
        path.write_bytes(zipped(b"one", b"two"))
        assert "contains 2 files; extract it" in rejected(path)
    else:
        path.write_bytes(compress(TEXT[:500]) + compress(TEXT[500:]))
        assert read(path) == [TEXT]
    for damaged in (compress(TEXT)[:-20], TEXT):
        path.write_bytes(damaged)
        assert f"cannot read {path}" in rejected(path)


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.parquet", "x.arrow"])
def test_damaged_files_are_rejected_in_one_line(tmp_path, name):
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:10] + b'"\xff{' * 9 if name == "x.csv" else data[:-15])
    assert f"{tmp_path / name}" in rejected(tmp_path / name)


def test_a_byte_order_mark_is_removed_and_binary_files_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK", 5)
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + TEXT)
    assert read(tmp_path / "bom") == [TEXT]
    (tmp_path / "utf16").write_bytes("text".encode("utf-16"))
    (tmp_path / "nul").write_bytes(b"\x7fELF\0")
    for name in ("utf16", "nul"):
        assert f"{name} is not text; convert it to UTF-8" in rejected(tmp_path / name)
    for name in ("x.pdf", "x.tar.gz", "x.TGZ", "x.sqlite"):
        (tmp_path / name).write_bytes(TEXT)
        assert f"{name} is not text" in rejected(tmp_path / name)


def test_folders_and_patterns_are_listed_in_order_and_files_read_once(tmp_path):
    for name in ("b.txt", "a/2.md", "a/1.md", ".hidden", ".git/x", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl([name]) if name.endswith("l") else name.encode())
    everything = [b"a/1.md", b"a/2.md", b"b.txt", b"c.jsonl"]
    assert read(tmp_path) == everything
    assert read(tmp_path / "b.txt", tmp_path) == [b"b.txt", b"a/1.md", b"a/2.md", b"c.jsonl"]
    assert read(tmp_path / "*" / "*.md") == everything[:2]
    assert sorted(read(f"{tmp_path}/**")) == everything
    assert read(tmp_path / "c.jsonl", format="text") == [jsonl(["c.jsonl"])]
    assert read(tmp_path / "b.txt", tmp_path / "b.txt") == [b"b.txt"]


def test_missing_paths_name_the_option_and_the_fix(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    assert "does not exist; give a file, a folder" in rejected(tmp_path / "absent")
    assert "no files found" in rejected(tmp_path / "empty", option="--data.test-path")
    assert "no files found" in rejected(tmp_path / "*.csv")
    assert "broken symbolic link" in rejected(tmp_path / "link")
    assert "neither a regular file nor a folder" in rejected("/dev/zero")


def test_the_text_field_is_found_or_chosen(tmp_path):
    path = tmp_path / "x.jsonl"
    record = {"id": 1, "title": "t", "body": "b", "meta": {"note": "n"}}
    path.write_text(json.dumps(record) + "\n")
    assert read(path, text_field="body") == [b"b"]
    assert read(path, text_field="meta.note") == [b"n"]
    assert "several fields with text (title, body); choose one" in rejected(path)
    for field in ("bdy", "id", "meta.x", "body.x.y"):
        problem = f"no text in the field {field!r} of id, title, body, meta; fix"
        assert problem in rejected(path, text_field=field)
    path.write_text('{"text": null}\n{"text": "\\ud800"}\n')
    assert read(path) == [b"", "\ufffd".encode()]
    path.write_text('{"id": 3}\n')
    assert "no field with text (id)" in rejected(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "invalid JSON"),
        ("[3]", "no text"),
        ('{"other": "x"}', "no text in the field 'text' of other"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, problem):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    message = rejected(tmp_path / "x.jsonl")
    assert message.startswith(f"{tmp_path}/x.jsonl, line 3: {problem}")
    assert "fix or remove it" in message


def test_saved_datasets_bring_their_splits(tmp_path, capsys):
    one = datasets.Dataset.from_dict({"text": DOCUMENTS})
    one.save_to_disk(str(tmp_path / "one"))
    capsys.readouterr()
    assert read(tmp_path / "one") == [document.encode() for document in DOCUMENTS]
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "dev", "odd")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "several"))
    capsys.readouterr()
    found = find_inputs([str(tmp_path / "several")])
    assert [(item.split, item.dataset_split) for item in found] == [
        (None, "train"),
        ("validation", "dev"),
    ]
    assert read(tmp_path / "several") == [b"train", b"dev"]
    assert "the split 'odd' is not used" in capsys.readouterr().err
    next((tmp_path / "several" / "dev").glob("*.arrow")).unlink()
    assert "save it again with save_to_disk" in rejected(tmp_path / "several")


def test_a_dataset_name_that_cannot_be_loaded_is_rejected(monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert "cannot load the dataset some/name: no network" in rejected("hf:some/name")


def test_missing_packages_name_the_install_command(tmp_path, monkeypatch):
    WRITERS["x.parquet"](tmp_path / "x.parquet")
    WRITERS["x.jsonl.zst"](tmp_path / "x.jsonl.zst")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, package in (("x.parquet", "datasets"), ("x.jsonl.zst", "pyarrow")):
        with pytest.raises(MissingExtraError, match=f"pip install {package}"):
            read(tmp_path / name)


def pipe(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_standard_input_is_stored_once(tmp_path, monkeypatch):
    config = DataConfig(path=("-", "other"))
    pipe(monkeypatch, TEXT)
    stored = store_stdin(config, tmp_path)
    assert stored.path[1] == "other"
    assert Path(stored.path[0]).read_bytes() == TEXT
    before = os.stat(stored.path[0]).st_mtime_ns
    pipe(monkeypatch, TEXT)
    assert store_stdin(config, tmp_path) == stored
    assert os.stat(stored.path[0]).st_mtime_ns == before
    assert store_stdin(DataConfig(path="x"), tmp_path) == DataConfig(path="x")


def test_standard_input_that_cannot_be_shared_is_rejected(tmp_path, monkeypatch):
    twice = DataConfig(path="-", test_path="-")
    assert "only once" in rejection(store_stdin, twice, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "only once" in rejection(store_stdin, DataConfig(path="-"), tmp_path)


def test_python_sources_are_hundreds_of_files_without_tests():
    files = [Path(item.path) for item in python_sources()]
    assert len(files) > 300
    assert {file.suffix for file in files} == {".py"}
    folders = {"test", "tests", "idle_test", "site-packages"}
    assert not [file for file in files if folders & set(file.parts)]
