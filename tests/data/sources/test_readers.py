"""Text files as pieces of documents, and files that cannot be read."""

import gzip
import json
import os

import pytest
from input_helpers import (
    TEXT,
    read,
    rejected,
    write,
)

from transformer_vq.data.sources import compression
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.inputs import find_inputs
from transformer_vq.data.sources.readers import ReadCounts, read_pieces


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_byte_order_marks_are_removed_and_utf16_is_converted(
    tmp_path, monkeypatch, encoding, chunk
):
    monkeypatch.setattr(compression, "CHUNK", chunk)
    text = "\u00e4 \U0001f600 text\r\n" * 10
    (tmp_path / "x.txt").write_bytes(text.encode(encoding))
    assert read(tmp_path / "x.txt") == [text.encode()]
    write(tmp_path, y_jsonl=json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    assert read(tmp_path / "y.jsonl") == [text.encode()]


@pytest.mark.parametrize("data", [b"\xff\xfea", b"\xff\xfe\x00\xd8a\x00"])
def test_invalid_utf16_is_rejected(tmp_path, data):
    write(tmp_path, x_txt=data)
    assert rejected(tmp_path / "x.txt").startswith(f"cannot read {tmp_path}/x.txt: 'utf-16")


def test_text_is_read_in_pieces_without_changes(tmp_path):
    data = bytes(range(1, 256)) * 10_000
    write(tmp_path, x_txt=data, y_txt=b"", z_txt=b"\xef\xbb\xbf")
    counts = ReadCounts()
    pieces = list(read_pieces(find_inputs([str(tmp_path)]), counts=counts))
    assert b"".join(piece.data for piece in pieces) == data
    assert max(len(piece.data) for piece in pieces) <= 1 << 20
    assert [piece.starts_document for piece in pieces] == [True, False, False]
    assert counts == ReadCounts(documents=3, empty=2)


# Files that cannot be read


def test_unreadable_files_of_a_folder_are_reported_together(tmp_path):
    write(tmp_path, a_txt=b"1", b_gz=gzip.compress(TEXT)[:12], c_txt=b"2")
    (tmp_path / "d.txt").symlink_to("nowhere")
    assert rejected(tmp_path) == (
        f"cannot read 2 of 4 files, for example {tmp_path}/b.gz (Compressed file ended before the "
        "end-of-stream marker was reached); fix or remove them"
    )


def test_files_that_become_unreadable_are_reported_after_everything_else(tmp_path):
    damaged = gzip.compress(os.urandom(200_000).hex().encode())[:-100_000]
    write(tmp_path, a_txt=b"1", b_gz=damaged, c_txt=b"2", d_txt=b"3")
    found = find_inputs([str(tmp_path)])
    (tmp_path / "c.txt").unlink()
    pieces = []
    with pytest.raises(DataError) as raised:
        pieces += (piece.data for piece in read_pieces(found))
    assert str(raised.value).startswith(f"cannot read 2 of 4 files, for example {tmp_path}/b.gz (")
    assert str(raised.value).endswith("); fix or remove them")


def test_reading_continues_after_an_unreadable_file(tmp_path):
    write(tmp_path, a_txt=b"1", b_txt=b"2", c_txt=b"3")
    found = find_inputs([str(tmp_path)])
    (tmp_path / "b.txt").unlink()
    pieces = read_pieces(found)
    assert [next(pieces).data, next(pieces).data] == [b"1", b"3"]
    with pytest.raises(DataError, match="cannot read 1 of 3 files"):
        next(pieces)


def test_a_file_without_read_permission_is_rejected(tmp_path, monkeypatch):
    write(tmp_path, x_txt=TEXT)
    found = find_inputs([str(tmp_path)])

    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(compression, "open", denied, raising=False)
    with pytest.raises(DataError, match=r"^cannot read .*x\.txt: Permission denied; "):
        list(read_pieces(found))


# Datasets saved to disk
