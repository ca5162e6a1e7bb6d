"""Text files as bytes: words, splits, and a fixed order of files."""

import gzip
import os
from pathlib import Path

import pytest
from data_helpers import documents, rejection, text_source
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.sources import compression
from transformer_vq.data.sources import text as module
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.paths import hash_order
from transformer_vq.data.sources.text import ByteFiles, count_words, python_sources, text_files

CONTENT = b"".join(b"%d bottles\tof  beer,\r\n" % i for i in range(100))


def n_words(source, split):
    return sum(part.n_words for part in source.chunks(split))


@given(st.lists(st.text("ab \n\t\r\x0b\x0c", max_size=6)))
def test_words_counted_in_chunks_match_the_complete_text(chunks):
    total, in_word = 0, False
    for chunk in chunks:
        n, in_word = count_words(chunk.encode(), in_word)
        total += n
    text = "".join(chunks)
    assert total == len(text.split())
    assert in_word == (text != "" and not text[-1].isspace())


@given(st.binary(), st.booleans())
def test_empty_data_does_not_end_a_word(data, in_word):
    assert count_words(b"", in_word) == (0, in_word)
    first = count_words(data, in_word)
    assert count_words(b"", first[1]) == (0, first[1])


def test_only_ascii_white_space_separates_words():
    assert count_words("a\u00a0b\u2003c \u3000".encode()) == (2, True)


@pytest.mark.parametrize(
    ("n", "edges"), [(1000, (900, 950)), (999, (899, 949)), (20, (18, 19)), (100, (90, 95))]
)
def test_splits_are_90_5_and_5_percent(tmp_path, n, edges):
    path = tmp_path / "text"
    path.write_bytes((CONTENT * 9)[:n])
    source = text_source(path)
    assert source.edges == edges
    assert [b"".join(documents(source, split)) for split in SPLITS] == [
        (CONTENT * 9)[low:high] for low, high in [(0, edges[0]), edges, (edges[1], n)]
    ]


def test_given_edges_are_used(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = ByteFiles.from_files(tmp_path / "text", [tmp_path / "text"], (10, 30))
    assert documents(source, "validation") == [CONTENT[10:30]]


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_the_chunk_size_does_not_change_documents_and_words(tmp_path, monkeypatch, chunk):
    for i in range(7):
        (tmp_path / f"{i}").write_bytes(CONTENT[: 50 * i + 30])
    source = text_source(tmp_path)
    want = [(documents(source, split), n_words(source, split)) for split in SPLITS]
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(compression, "CHUNK", chunk)
    source = text_source(tmp_path)
    assert [(documents(source, split), n_words(source, split)) for split in SPLITS] == want
    longest = max(len(part.tokens) for part in source.chunks("train"))
    assert longest <= chunk


def test_words_are_counted_per_document(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}").write_bytes(b"no line end")
    source = text_source(tmp_path)
    assert source.edges == (198, 209)  # 18 files, 1 file, 1 file
    assert [n_words(source, split) for split in SPLITS] == [54, 3, 3]


def test_a_file_divided_between_splits_is_a_document_in_each(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = text_source(tmp_path / "text")
    low, high = source.edges
    assert documents(source, "train") == [CONTENT[:low]]
    assert documents(source, "validation") == [CONTENT[low:high]]
    assert documents(source, "test") == [CONTENT[high:]]


def test_each_file_is_a_document_and_none_is_lost(tmp_path):
    contents = {tmp_path / f"{i}.txt": b"%d " % i * (i + 5) for i in range(40)}
    for path, content in contents.items():
        path.write_bytes(content)
    source = text_source(tmp_path)
    assert set(source.files) == set(contents)
    assert b"".join(d for split in SPLITS for d in documents(source, split)) == b"".join(
        contents[file] for file in source.files
    )
    want = [contents[file] for file in source.files]
    train = documents(source, "train")
    assert train[:-1] == want[: len(train) - 1]
    assert want[len(train) - 1].startswith(train[-1])


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


def test_the_order_of_files_depends_on_their_names_only(tmp_path):
    names = [f"{i}" for i in range(10)]
    here, there = (hash_order(root, [root / n for n in names]) for root in (tmp_path, Path("/x/y")))
    assert [f.name for f in here] == [f.name for f in there]
    assert [f.name for f in here] != names


def test_file_names_that_are_not_utf8_are_accepted(tmp_path):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    odd.write_text("x" * 60)
    (tmp_path / "plain").write_text("y" * 40)
    source = text_source(tmp_path)
    assert set(source.files) == {odd, tmp_path / "plain"}
    assert b"".join(documents(source, "train")).count(b"x") >= 50


def test_hidden_and_empty_files_are_skipped(tmp_path):
    for name in (".hidden", ".git/config", "a/.b/c", "kept", "a/kept too"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty").write_text("")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    source = text_source(tmp_path)
    assert {str(f.relative_to(tmp_path)) for f in source.files} == {"kept", "a/kept too"}
    assert source.n_bytes == 8


def test_a_folder_inside_a_hidden_folder_is_accepted(tmp_path):
    root = tmp_path / ".cache" / "texts"
    root.mkdir(parents=True)
    (root / "one").write_text("text")
    assert text_files(root) == [root / "one"]


def test_a_file_that_becomes_shorter_is_rejected(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = text_source(tmp_path / "text")
    (tmp_path / "text").write_bytes(CONTENT[:100])
    with pytest.raises(DataError, match="text: it has become shorter; it may"):
        list(source.chunks("train"))


def test_a_file_deleted_while_reading_is_reported(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = text_source(tmp_path / "text")
    (tmp_path / "text").unlink()
    with pytest.raises(DataError, match=r"cannot read .*text: .*No such file"):
        list(source.chunks("train"))


def test_a_missing_path_is_rejected(tmp_path):
    want = f"{tmp_path}/absent does not exist; --data.path must be a text file or a folder of them"
    assert rejection(text_source, tmp_path / "absent") == want


def test_a_file_that_becomes_longer_is_rejected(tmp_path):
    (tmp_path / "text").write_bytes(CONTENT)
    source = text_source(tmp_path / "text")
    (tmp_path / "text").write_bytes(CONTENT + b"more")
    list(source.chunks("train"))
    with pytest.raises(DataError, match="text: it has become longer"):
        list(source.chunks("test"))


def test_an_empty_file_is_rejected(tmp_path):
    (tmp_path / "text").write_text("")
    assert rejection(text_source, tmp_path / "text").startswith(f"{tmp_path}/text is empty")


def test_a_folder_without_text_is_rejected(tmp_path):
    (tmp_path / "empty").write_text("")
    assert rejection(text_source, tmp_path).startswith(f"{tmp_path} contains no text; ")


def test_the_fingerprint_depends_on_content_names_times_and_edges(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(CONTENT)
    first = text_source(path).fingerprint()
    assert text_source(path).fingerprint() == first
    assert ByteFiles.from_files(path, [path], (10, 20)).fingerprint() != first
    assert text_source(path.rename(tmp_path / "other")).fingerprint() != first
    path.write_bytes(CONTENT)
    os.utime(path, (0, 0))
    assert text_source(path).fingerprint() != first


def test_python_sources_are_hundreds_of_files_without_tests():
    root, files = python_sources()
    assert len(files) > 300
    assert root / "argparse.py" in files
    for file in files:
        assert file.suffix == ".py"
        parts = set(file.relative_to(root).parts)
        assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert hash_order(root, files) == files
