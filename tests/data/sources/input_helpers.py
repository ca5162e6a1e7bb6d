"""Documents in files of every format and compression, and what the readers make of them."""

import bz2
import csv
import gzip
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.inputs import find_inputs
from transformer_vq.data.sources.readers import read_pieces

DOCUMENTS = ['first, "quoted"\r\nline; two\n', "zweites\tDokument \u00fc\U0001f600", "a|b", " x "]


def zip_one(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr(f"folder/{path.stem}", data)


COMPRESSORS = {
    ".gz": lambda path, data: path.write_bytes(gzip.compress(data)),
    ".bz2": lambda path, data: path.write_bytes(bz2.compress(data)),
    ".xz": lambda path, data: path.write_bytes(lzma.compress(data)),
    ".zst": lambda path, data: path.write_bytes(zstandard.compress(data)),
    ".zip": zip_one,
}


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": i, field: x}) + "\n" for i, x in enumerate(texts)).encode()


def write_table(path, texts, kind, **columns):
    """Write an Arrow table as Parquet, or as an Arrow file or stream."""
    table = pa.table({"id": pa.array(range(len(texts)), pa.int64()), "text": texts, **columns})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
        return
    new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_csv(path, texts, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["id", "text"])
        rows.writerows(enumerate(texts))


def write_saved_dataset(folder, shards):
    """Write the files of `datasets.Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_table(folder / name, texts, "stream")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


WRITERS = {
    "x.jsonl": lambda path, texts: path.write_bytes(jsonl(texts)),
    "x.json": lambda path, texts: path.write_text(json.dumps([{"text": x} for x in texts])),
    "x.csv": write_csv,
    "x.tsv": lambda path, texts: write_csv(path, texts, "\t"),
    "x.parquet": lambda path, texts: write_table(path, texts, "parquet"),
    "x.arrow": lambda path, texts: write_table(path, texts, "arrow"),
    "stream.arrow": lambda path, texts: write_table(path, texts, "stream"),
}


def read(*paths, field=None, format="auto", counts=None):
    """Return the documents of paths, as bytes."""
    found = []
    for piece in read_pieces(find_inputs([str(x) for x in paths], format), field, counts):
        assert piece.data
        if piece.starts_document:
            found.append(b"")
        found[-1] += piece.data
    return found


def rejected(*paths, **options):
    """Return the message of the DataError for paths that cannot be read; it must be one line."""
    with pytest.raises(DataError) as raised:
        read(*paths, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


TEXT = b"".join(b"%d bottles of beer\n" % i for i in range(100))
LINES = jsonl(["one", "two"])


def write(folder, **files):
    """Write files; _ in a name stands for a dot, and __ for a slash."""
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(*paths, format="auto"):
    return [Path(x.name).name for x in find_inputs([str(path) for path in paths], format)]
