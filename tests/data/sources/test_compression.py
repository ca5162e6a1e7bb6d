"""Compressed text files: the tokens of the plain file, and corruption that is rejected."""

import bz2
import gzip
import lzma
import zipfile

import numpy as np
import pytest
from data_helpers import documents, rejection, text_source

from transformer_vq.data.sources import compression
from transformer_vq.data.sources import text as module
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.compression import decompressed_size

CONTENT = b"".join(b"%d bottles\tof  beer,\r\n" % i for i in range(100))


def zip_one(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr("folder/content", data)


COMPRESSORS = {
    ".gz": lambda path, data: path.write_bytes(gzip.compress(data)),
    ".xz": lambda path, data: path.write_bytes(lzma.compress(data)),
    ".bz2": lambda path, data: path.write_bytes(bz2.compress(data)),
    ".zip": zip_one,
}


def compressed(folder, suffix, data=CONTENT):
    path = folder / f"content{suffix}"
    COMPRESSORS[suffix](path, data)
    return path


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_compressed_file_gives_the_tokens_of_the_plain_file(tmp_path, monkeypatch, suffix, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(compression, "CHUNK", chunk)
    (tmp_path / "plain").write_bytes(CONTENT)
    plain, decompressed = text_source(tmp_path / "plain"), text_source(compressed(tmp_path, suffix))
    assert (decompressed.sizes, decompressed.edges) == (plain.sizes, plain.edges)
    for split in SPLITS:
        for one, other in zip(plain.chunks(split), decompressed.chunks(split), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert (one.starts_document, one.n_words) == (other.starts_document, other.n_words)


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_truncated_compressed_file_is_rejected_in_one_line(tmp_path, suffix, share):
    path = compressed(tmp_path, suffix)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    message = rejection(text_source, path)
    assert message.startswith(f"cannot read {path}: ")
    assert message.endswith("; it may be incomplete, copy or download it again")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_corrupt_compressed_file_is_rejected(tmp_path, suffix):
    path = compressed(tmp_path, suffix, np.random.default_rng(0).bytes(5000))
    data = bytearray(path.read_bytes())
    data[2000:2200] = bytes(200)
    path.write_bytes(data)
    assert rejection(text_source, path).startswith(f"cannot read {path}: ")


def test_a_zip_file_must_contain_one_file(tmp_path):
    path = tmp_path / "content.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one", CONTENT)
        archive.writestr("two", CONTENT)
    assert "it contains 2 files instead of one" in rejection(text_source, path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("folder")
    assert "it contains 0 files instead of one" in rejection(text_source, path)


def test_an_encrypted_zip_file_is_rejected(tmp_path):
    path = compressed(tmp_path, ".zip")
    data = path.read_bytes()
    # The flags of the second entry, in its own header and in the directory at the end.
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.rindex(signature) + offset
        data = data[:at] + b"\x01" + data[at + 1 :]
    path.write_bytes(data)
    assert "encrypted" in rejection(text_source, path)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_flipped_byte_of_a_compressed_file_is_rejected_or_has_no_effect(tmp_path, suffix):
    """No other error of Python's readers escapes."""
    path = compressed(tmp_path, suffix, CONTENT[:200])
    data = path.read_bytes()
    for offset in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :])
            try:
                source = text_source(path)
                content = b"".join(d for split in SPLITS for d in documents(source, split))
                message = ""
            except DataError as error:
                content, message = CONTENT[:200], str(error)
            assert content == CONTENT[:200]
            assert "\n" not in message


def test_suffixes_of_compressed_files_may_be_upper_case(tmp_path):
    path = tmp_path / "TEXT.GZ"
    path.write_bytes(gzip.compress(CONTENT))
    assert text_source(path).n_bytes == len(CONTENT)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_decompressed_size_counts_decompressed_bytes(tmp_path, suffix):
    path = compressed(tmp_path, suffix)
    assert decompressed_size(path) == len(CONTENT)
    assert decompressed_size(path) != path.stat().st_size
