"""Compressed files: the documents of the plain file, and corruption that is rejected."""

import gzip
import io
import random
import sys
import zipfile

import pytest
import zstandard
from input_helpers import COMPRESSORS, DOCUMENTS, WRITERS, read, rejected

from transformer_vq.data.sources import compression
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import Files, compression_of, decompressed_size
from transformer_vq.errors import MissingExtraError

CONTENT = b"".join(b"%d bottles\tof  beer,\r\n" % i for i in range(100))
NOISE = random.Random(0).randbytes(5000)


def compressed(folder, suffix, data=CONTENT):
    path = folder / f"content{suffix}"
    COMPRESSORS[suffix](path, data)
    return path


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_compressed_file_of_any_format_gives_the_same_documents(tmp_path, name, suffix):
    WRITERS[name](tmp_path / name, DOCUMENTS)
    path = tmp_path / (name + suffix)
    COMPRESSORS[suffix](path, (tmp_path / name).read_bytes())
    assert read(path) == [x.encode() for x in DOCUMENTS]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_compressed_text_is_one_document_with_the_same_bytes(tmp_path, monkeypatch, suffix, chunk):
    monkeypatch.setattr(compression, "CHUNK", chunk)
    assert read(compressed(tmp_path, suffix)) == [CONTENT]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("name", ["content", "content.txt", "content.XZ", "content.gz"])
def test_compression_is_recognized_by_content(tmp_path, suffix, name):
    compressed(tmp_path, suffix).rename(tmp_path / name)
    assert read(tmp_path / name) == [CONTENT]


def test_a_plain_file_with_the_suffix_of_a_compressed_one_is_read(tmp_path):
    for shift in range(3):
        text = (shift * "x" + 5000 * "\u20ac").encode()
        (tmp_path / "content.gz").write_bytes(text)
        assert read(tmp_path / "content.gz") == [text]
    (tmp_path / "letters.bz2").write_bytes(b"BZh1 are the letters that start bzip2 files")
    assert len(read(tmp_path / "letters.bz2")) == 1


def test_other_binary_data_is_not_a_compressed_file(tmp_path):
    for data in (NOISE, b"\0text"):
        (tmp_path / "x.gz").write_bytes(data)
        assert "x.gz: it is not a valid .gz file" in rejected(tmp_path / "x.gz")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = compressed(tmp_path, ".zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match="pip install zstandard"):
        read(path)


@pytest.mark.parametrize("suffix", [x for x in COMPRESSORS if x != ".zip"])
def test_concatenated_compressed_files_are_read_to_the_end(tmp_path, suffix):
    path = compressed(tmp_path, suffix)
    path.write_bytes(2 * path.read_bytes())
    assert read(path) == [2 * CONTENT]


def test_zstandard_frames_that_must_be_skipped_are_skipped(tmp_path):
    path = tmp_path / "x.zst"
    path.write_bytes(b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstandard.compress(CONTENT))
    assert read(path) == [CONTENT]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_truncated_compressed_file_is_rejected_in_one_line(tmp_path, suffix, share):
    path = compressed(tmp_path, suffix, NOISE.hex().encode())
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    message = rejected(path)
    assert message.startswith(f"cannot read {path}: ")
    assert message.endswith("; it may be incomplete, copy or download it again")


def test_a_zstandard_file_without_its_last_byte_is_rejected(tmp_path):
    (tmp_path / "x.zst").write_bytes(zstandard.compress(CONTENT)[:-1])
    assert rejected(tmp_path / "x.zst").startswith(f"cannot read {tmp_path}/x.zst: ")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_flipped_byte_of_a_compressed_file_is_rejected_or_has_no_effect(tmp_path, suffix):
    """No other error of the readers escapes."""
    path = compressed(tmp_path, suffix, CONTENT[:60])
    data = path.read_bytes()
    if suffix == ".zst":
        data = zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT[:60])
    for offset in range(len(data)):
        for mask in (0x01, 0xFF):
            path.write_bytes(data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :])
            try:
                content, message = read(path), ""
            except DataError as error:
                content, message = [CONTENT[:60]], str(error)
            assert content == [CONTENT[:60]]
            assert "\n" not in message


def test_members_of_a_zip_file_are_documents(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.mkdir("folder")
        archive.writestr("folder/b.txt", b"two")
        archive.writestr("a", b"one")
        archive.writestr("c.gz", gzip.compress(b"three"))
        for hidden in (".hidden", "__MACOSX/a", ".git/config"):
            archive.writestr(hidden, b"hidden")
    assert read(tmp_path / "x.zip") == [b"one", b"three", b"two"]


def test_members_of_a_zip_file_have_their_own_format(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("../../a.jsonl", b'{"text": "one"}\n{"text": "two"}')
        archive.writestr("/b.jsonl", b'{"text": "three"}')
    assert read(tmp_path / "x.zip") == [b"one", b"two", b"three"]
    assert f"{tmp_path}/x.zip/../../a.jsonl has no field 'z'" in rejected(
        tmp_path / "x.zip", field="z"
    )
    with zipfile.ZipFile(tmp_path / "x.zip", "a") as archive:
        archive.writestr("readme.txt", b"text")
    assert "contains different formats" in rejected(tmp_path / "x.zip")


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_decompressed_size_counts_decompressed_bytes(tmp_path, suffix):
    (tmp_path / "content").write_bytes(CONTENT)
    path = compressed(tmp_path, suffix) if suffix else tmp_path / "content"
    assert decompressed_size(path) == len(CONTENT)


def test_an_archive_without_a_member_name_must_contain_one_file(tmp_path):
    path = compressed(tmp_path, ".zip")
    with Files() as files, files.open(path) as stream:
        assert stream.read() == CONTENT
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("another", CONTENT)
    with pytest.raises(zipfile.BadZipFile, match="2 files instead of one"):
        decompressed_size(path)


def test_an_archive_is_opened_once_for_all_of_its_members(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for i in range(20):
            archive.writestr(f"{i:02}.txt", b"%d" % i)
    opened = []
    real = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: opened.append(path) or real(path))
    assert len(read(tmp_path / "x.zip")) == 20
    assert len(opened) == 2  # to recognize the members, and to read them


def test_an_archive_without_files_or_with_archives_is_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(tmp_path / "empty.zip", "inner.zip")
    assert "contains no files" in rejected(tmp_path / "empty.zip")
    assert rejected(tmp_path / "x.zip") == (
        f"{tmp_path}/x.zip/inner.zip is an archive; extract it first"
    )


def test_an_encrypted_zip_file_is_rejected(tmp_path):
    path = compressed(tmp_path, ".zip")
    data = path.read_bytes()
    # The flags of the second entry, in its own header and in the directory at the end.
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.rindex(signature) + offset
        data = data[:at] + b"\x01" + data[at + 1 :]
    path.write_bytes(data)
    assert "is encrypted; extract the archive" in rejected(path)


def test_streams_of_corrupt_files_are_closed(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(CONTENT)[:-4])
    with Files() as files, files.open(tmp_path / "x.gz") as stream, pytest.raises(EOFError):
        stream.read()
    assert stream.closed
    assert stream._file.closed


@pytest.mark.parametrize("head", [b"", b"B", b"BZh", b"BZh0", b"BZhello world", b"PK", b"\x1f\x8b"])
def test_other_first_bytes_are_not_a_compression(head):
    assert compression_of(head) is None


def test_highly_compressed_data_is_decompressed_in_small_steps():
    bomb = io.BytesIO(zstandard.compress(bytes(1 << 28)))
    sizes = [len(chunk) for chunk in compression._zstd_chunks(bomb)]
    assert sum(sizes) == 1 << 28
    assert max(sizes) <= 1 << 25
