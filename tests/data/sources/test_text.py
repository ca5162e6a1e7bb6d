"""Bytes of files: words and splits whatever the chunks, packed files, orders that never change."""

import bz2
import gzip
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.sources import text as module
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.text import (
    ByteFiles,
    count_words,
    mixed,
    python_sources,
    text_files,
    unpacked_size,
)

CONTENT = b"".join(b"%d bottles\tof  beer,\r\n" % i for i in range(100))


def zip_one(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr("folder/content", data)


PACKERS = {
    ".gz": lambda path, data: path.write_bytes(gzip.compress(data)),
    ".xz": lambda path, data: path.write_bytes(lzma.compress(data)),
    ".bz2": lambda path, data: path.write_bytes(bz2.compress(data)),
    ".zip": zip_one,
}


def packed(folder, ending, data=CONTENT):
    path = folder / f"content{ending}"
    PACKERS[ending](path, data)
    return path


def source_of(path):
    return ByteFiles.of(path, text_files(path))


def documents(source, split):
    """The bytes of a split, a list per document."""
    found = []
    for piece in source.chunks(split):
        assert piece.tokens.dtype == np.uint8
        assert len(piece.tokens) == piece.n_bytes
        if piece.begins:
            found.append(b"")
        found[-1] += piece.tokens.tobytes()
    return found


def n_words(source, split):
    return sum(piece.n_words for piece in source.chunks(split))


def refusal(path):
    """The one line with which a path is refused."""
    with pytest.raises(DataError) as raised:
        source_of(path)
    message = str(raised.value)
    assert "\n" not in message
    return message


@given(st.lists(st.text("ab \n\t\r\x0b\x0c", max_size=6)))
def test_words_are_the_same_counted_in_chunks(chunks):
    total, in_word = 0, False
    for chunk in chunks:
        n, in_word = count_words(chunk.encode(), in_word)
        total += n
    whole = "".join(chunks)
    assert total == len(whole.split())
    assert in_word == (whole != "" and not whole[-1].isspace())


@given(st.binary(), st.booleans())
def test_no_bytes_change_nothing_about_a_word(data, in_word):
    assert count_words(b"", in_word) == (0, in_word)
    first = count_words(data, in_word)
    assert count_words(b"", first[1]) == (0, first[1])


def test_only_ascii_white_space_divides_words():
    assert count_words("a\u00a0b\u2003c \u3000".encode()) == (2, True)


@pytest.mark.parametrize(
    ("n", "edges"), [(1000, (900, 950)), (999, (899, 949)), (20, (18, 19)), (100, (90, 95))]
)
def test_splits_are_90_5_and_5_percent(tmp_path, n, edges):
    path = tmp_path / "text"
    path.write_bytes((CONTENT * 9)[:n])
    source = source_of(path)
    assert source.edges == edges
    assert [b"".join(documents(source, split)) for split in SPLITS] == [
        (CONTENT * 9)[low:high] for low, high in [(0, edges[0]), edges, (edges[1], n)]
    ]


def test_edges_may_be_given(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = ByteFiles.of(tmp_path / "text", [tmp_path / "text"], (10, 30))
    assert documents(source, "validation") == [CONTENT[10:30]]


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_what_is_read_at_once_changes_nothing(tmp_path, monkeypatch, chunk):
    for i in range(7):
        (tmp_path / f"{i}").write_bytes(CONTENT[: 50 * i + 30])
    whole = source_of(tmp_path)
    want = [(documents(whole, split), n_words(whole, split)) for split in SPLITS]
    monkeypatch.setattr(module, "CHUNK", chunk)
    source = source_of(tmp_path)
    assert [(documents(source, split), n_words(source, split)) for split in SPLITS] == want
    longest = max(len(piece.tokens) for piece in source.chunks("train"))
    assert longest <= chunk


def test_words_are_counted_per_document(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}").write_bytes(b"no line end")
    source = source_of(tmp_path)
    assert source.edges == (198, 209)  # 18 files, 1 file, 1 file
    assert [n_words(source, split) for split in SPLITS] == [54, 3, 3]


def test_a_file_cut_between_splits_is_a_document_on_both_sides(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = source_of(tmp_path / "text")
    low, high = source.edges
    assert documents(source, "train") == [CONTENT[:low]]
    assert documents(source, "validation") == [CONTENT[low:high]]
    assert documents(source, "test") == [CONTENT[high:]]


def test_every_file_is_a_document_and_none_is_lost(tmp_path):
    contents = {tmp_path / f"{i}.txt": b"%d " % i * (i + 5) for i in range(40)}
    for path, content in contents.items():
        path.write_bytes(content)
    source = source_of(tmp_path)
    assert set(source.files) == set(contents)
    assert b"".join(d for split in SPLITS for d in documents(source, split)) == b"".join(
        contents[file] for file in source.files
    )
    whole = [contents[file] for file in source.files]
    train = documents(source, "train")
    assert train[:-1] == whole[: len(train) - 1]
    assert whole[len(train) - 1].startswith(train[-1])


def test_the_order_of_files_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    for name in ("b/2", "a/1", "c", "a/z/3", "d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files = text_files(tmp_path)
    assert len(files) == 5
    listed = list(os.walk(tmp_path))
    for order in (sorted(listed), sorted(listed, reverse=True)):
        monkeypatch.setattr(os, "walk", lambda *_, order=order, **__: iter(order))
        assert text_files(tmp_path) == files


def test_the_order_of_files_depends_on_their_names_alone(tmp_path):
    names = [f"{i}" for i in range(10)]
    here, there = (mixed(root, [root / n for n in names]) for root in (tmp_path, Path("/x/y")))
    assert [f.name for f in here] == [f.name for f in there]
    assert [f.name for f in here] != names


def test_names_that_are_no_utf8_have_a_place_in_the_order(tmp_path):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    odd.write_text("x" * 60)
    (tmp_path / "plain").write_text("y" * 40)
    source = source_of(tmp_path)
    assert set(source.files) == {odd, tmp_path / "plain"}
    assert b"".join(documents(source, "train")).count(b"x") >= 50


def test_hidden_and_empty_files_are_left_out(tmp_path):
    for name in (".hidden", ".git/config", "a/.b/c", "kept", "a/kept too"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty").write_text("")
    PACKERS[".gz"](tmp_path / "empty.gz", b"")
    source = source_of(tmp_path)
    assert {str(f.relative_to(tmp_path)) for f in source.files} == {"kept", "a/kept too"}
    assert source.n_bytes == 8


def test_a_folder_may_itself_lie_in_a_hidden_one(tmp_path):
    root = tmp_path / ".cache" / "texts"
    root.mkdir(parents=True)
    (root / "one").write_text("text")
    assert text_files(root) == [root / "one"]


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_packed_file_gives_the_tokens_of_the_plain_one(tmp_path, monkeypatch, ending, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    (tmp_path / "plain").write_bytes(CONTENT)
    plain, unpacked = source_of(tmp_path / "plain"), source_of(packed(tmp_path, ending))
    assert (unpacked.sizes, unpacked.edges) == (plain.sizes, plain.edges)
    for split in SPLITS:
        for one, other in zip(plain.chunks(split), unpacked.chunks(split), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert (one.begins, one.n_words) == (other.begins, other.n_words)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_truncated_packed_file_is_named_in_one_line(tmp_path, ending, share):
    path = packed(tmp_path, ending)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    message = refusal(path)
    assert message.startswith(f"cannot read {path}: ")
    assert message.endswith("; it may be incomplete, copy or fetch it again")


@pytest.mark.parametrize("ending", PACKERS)
def test_damage_within_a_packed_file_is_found(tmp_path, ending):
    path = packed(tmp_path, ending, np.random.default_rng(0).bytes(5000))
    data = bytearray(path.read_bytes())
    data[2000:2200] = bytes(200)
    path.write_bytes(data)
    assert refusal(path).startswith(f"cannot read {path}: ")


def test_a_zip_file_must_hold_one_file(tmp_path):
    path = tmp_path / "content.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one", CONTENT)
        archive.writestr("two", CONTENT)
    assert "it holds 2 files instead of one" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("folder")
    assert "it holds 0 files instead of one" in refusal(path)


def test_a_zip_file_with_a_password_is_refused(tmp_path):
    path = packed(tmp_path, ".zip")
    data = path.read_bytes()
    # The flags of the second entry, in its own header and in the directory at the end.
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.rindex(signature) + offset
        data = data[:at] + b"\x01" + data[at + 1 :]
    path.write_bytes(data)
    assert "encrypted" in refusal(path)


def test_a_file_that_shrinks_is_named(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = source_of(tmp_path / "text")
    (tmp_path / "text").write_bytes(CONTENT[:100])
    with pytest.raises(DataError, match="text: it ended earlier than before; it may"):
        list(source.chunks("train"))


def test_a_file_that_vanishes_is_named(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = source_of(tmp_path / "text")
    (tmp_path / "text").unlink()
    with pytest.raises(DataError, match=r"cannot read .*text: .*No such file"):
        list(source.chunks("train"))


def test_a_missing_path_is_named(tmp_path):
    want = f"{tmp_path}/absent does not exist; --data.path must be a file or a folder of text"
    assert refusal(tmp_path / "absent") == want


def test_a_file_that_grows_is_named(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = source_of(tmp_path / "text")
    (tmp_path / "text").write_bytes(CONTENT + b"more")
    list(source.chunks("train"))
    with pytest.raises(DataError, match="text: it has grown"):
        list(source.chunks("test"))


@pytest.mark.parametrize("ending", PACKERS)
def test_any_flipped_byte_of_a_packed_file_is_rejected_in_one_line_or_harmless(tmp_path, ending):
    """Whatever Python's readers raise for it."""
    path = packed(tmp_path, ending, CONTENT[:200])
    data = path.read_bytes()
    for place in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            try:
                source = source_of(path)
                content = b"".join(d for split in SPLITS for d in documents(source, split))
                message = ""
            except DataError as error:
                content, message = CONTENT[:200], str(error)
            assert content == CONTENT[:200]
            assert "\n" not in message


def test_endings_of_packed_files_may_be_in_upper_case(tmp_path):
    path = tmp_path / "TEXT.GZ"
    path.write_bytes(gzip.compress(CONTENT))
    assert source_of(path).n_bytes == len(CONTENT)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("")
    assert refusal(tmp_path / "text").startswith(f"{tmp_path}/text is empty")


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    assert refusal(tmp_path).startswith(f"there is no text below {tmp_path}")


def test_the_fingerprint_tells_contents_names_and_edges_apart(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(CONTENT)
    first = source_of(path).fingerprint()
    assert source_of(path).fingerprint() == first
    assert ByteFiles.of(path, [path], (10, 20)).fingerprint() != first
    assert source_of(path.rename(tmp_path / "other")).fingerprint() != first
    path.write_bytes(CONTENT)
    os.utime(path, (0, 0))
    assert source_of(path).fingerprint() != first


@pytest.mark.parametrize("ending", PACKERS)
def test_the_size_is_that_of_the_unpacked_bytes(tmp_path, ending):
    path = packed(tmp_path, ending)
    assert unpacked_size(path) == len(CONTENT)
    assert unpacked_size(path) != path.stat().st_size


def test_python_brings_hundreds_of_sources_along():
    root, files = python_sources()
    assert len(files) > 300
    assert root / "argparse.py" in files
    for file in files:
        assert file.suffix == ".py"
        parts = set(file.relative_to(root).parts)
        assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert mixed(root, files) == files
