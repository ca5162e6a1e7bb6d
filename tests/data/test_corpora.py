"""Datasets by name: enwik8 with its splits and download, and books in the folders of PG-19."""

import gzip
import hashlib
import os
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from data_helpers import documents, rejection, story
from sentencepiece_models import train_sentencepiece

from transformer_vq.config import DataConfig
from transformer_vq.data import corpora
from transformer_vq.data.corpora import download
from transformer_vq.data.documents import find_edges
from transformer_vq.data.paths import SPLITS
from transformer_vq.data.prepare import prepare

CONTENT = np.random.default_rng(0).integers(1, 256, 1000, np.uint8).tobytes()
VOCAB_SIZE = 340
BOOKS = {"train": range(5), "validation": (60, 70), "test": (80, 90)}


def write_zip(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", CONTENT)


def enwik8_config(tmp_path, *path):
    paths = tuple(map(str, path))
    cache = str(tmp_path / "cache")
    return DataConfig("enwik8", paths, end_of_document=False, cache=cache)


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_complete_file_has_the_published_splits(tmp_path, monkeypatch, capsys, is_complete):
    source = SimpleNamespace(dataset="enwik8", shares=(0.05, 0.05))
    assert find_edges(source, np.array([corpora.SIZE])) == (90_000_000, 95_000_000)
    if is_complete:
        monkeypatch.setattr(corpora, "SIZE", 1000)
    (tmp_path / "enwik8").write_bytes(CONTENT)
    corpus = prepare(enwik8_config(tmp_path, tmp_path / "enwik8"))
    for split, (first, last) in zip(SPLITS, pairwise((0, 900, 950, 1000)), strict=True):
        assert documents(corpus, split) == [CONTENT[first:last]]
    found = capsys.readouterr().err
    assert ("has 1,000 bytes instead of" in found) == (not is_complete)
    assert found.count("\n") == (not is_complete)


def test_compressed_files_folders_and_the_download_are_used(tmp_path):
    message = rejection(prepare, enwik8_config(tmp_path))
    assert "run `tvq prepare enwik8` or give a file as --data.path" in message
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    write_zip(downloads / "enwik8.zip")
    (tmp_path / "other.gz").write_bytes(gzip.compress(CONTENT))
    for paths in ((), (downloads,), (tmp_path / "other.gz",)):
        assert documents(prepare(enwik8_config(tmp_path, *paths)), "train") == [CONTENT[:900]]


def test_missing_and_corrupt_files_are_rejected_in_one_line(tmp_path):
    broken, empty = tmp_path / "enwik8.zip", tmp_path / "empty"
    write_zip(broken)
    broken.write_bytes(broken.read_bytes()[:500])
    empty.mkdir()
    for path, reason in [
        (broken, "cannot read"),
        (tmp_path / "absent", "does not exist"),
        (empty, "contains neither enwik8 nor"),
        (Path("/dev/zero"), "neither a regular file nor a folder"),
    ]:
        message = rejection(prepare, enwik8_config(tmp_path, path))
        assert reason in message
        assert str(path) in message


def test_a_download_is_checked_and_not_repeated(tmp_path):
    (tmp_path / "published.zip").write_bytes(CONTENT)
    url, digest = (tmp_path / "published.zip").as_uri(), hashlib.sha256(CONTENT).hexdigest()
    path = download(tmp_path / "cache", url, digest)
    assert path == tmp_path / "cache/downloads/enwik8.zip"
    assert path.read_bytes() == CONTENT
    assert download(tmp_path / "cache", "file:///absent", digest) == path
    path.write_bytes(b"corrupt")
    assert download(tmp_path / "cache", url, digest).read_bytes() == CONTENT


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_a_failed_download_is_reported_in_one_line_and_leaves_no_files(tmp_path, digest):
    (tmp_path / "published.zip").write_bytes(CONTENT)
    url = "file:///absent" if digest is None else (tmp_path / "published.zip").as_uri()
    assert "cannot download" in rejection(download, tmp_path, url, digest or "")
    assert list((tmp_path / "downloads").iterdir()) == []


def book(seed: int) -> str:
    return f"BOOK {seed}\n\n\n" + story(60 + seed).replace("fox", "caf\u00e9")


def write_books(root, end="\n"):
    for split, seeds in BOOKS.items():
        (root / split).mkdir(parents=True)
        for seed in seeds:
            text = book(seed).replace("\n", end)
            (root / split / f"{seed}.txt").write_bytes(text.encode())


@pytest.fixture
def root(tmp_path):
    write_books(tmp_path / "books")
    return tmp_path / "books"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "books.model"
    train_sentencepiece([book(seed) for seed in BOOKS["train"]], VOCAB_SIZE, path)
    return path


@pytest.fixture
def books(root, model):
    """The config of the books with a given vocabulary."""
    cache = str(root.parent / "cache")
    return DataConfig("pg19", str(root), tokenizer=str(model), end_of_document=False, cache=cache)


def test_each_book_is_one_lossless_document_with_its_words(books, model):
    corpus = prepare(books, VOCAB_SIZE)
    assert (corpus.vocab_size, corpus.bos, list(corpus.sizes)) == (VOCAB_SIZE, 1, list(SPLITS))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for split, seeds in BOOKS.items():
        texts = sorted(book(seed).encode() for seed in seeds)
        assert sorted(documents(corpus, split)) == texts
        size, found = corpus.sizes[split], corpus.split(split)
        assert size.bytes == sum(map(len, texts))
        assert size.words == sum(len(text.split()) for text in texts)
        edges = [*found.starts.tolist(), len(found)]
        got = [found[a:b].tolist() for a, b in pairwise(edges)]
        assert sorted(got) == sorted(reference.encode(book(seed)) for seed in seeds)


def test_line_endings_do_not_change_the_tokens(books, tmp_path):
    write_books(tmp_path / "crlf", end="\r\n")
    lf, crlf = prepare(books), prepare(replace(books, path=str(tmp_path / "crlf")))
    assert lf.folder != crlf.folder
    assert (lf.sha256, lf.sizes) == (crlf.sha256, crlf.sizes)


def test_missing_books_and_vocabularies_are_rejected(root, books):
    message = rejection(prepare, replace(books, tokenizer=None), VOCAB_SIZE)
    assert "give a SentencePiece .model file as --data.tokenizer" in message
    message = rejection(prepare, replace(books, path=str(root / "nowhere")))
    assert "nowhere does not exist; --data.path must contain the books" in message
    (root / "train" / "2.txt").write_bytes("caf\u00e9".encode("latin-1"))
    assert "2.txt is not UTF-8" in rejection(prepare, books)
    assert "2.txt is not UTF-8" in rejection(prepare, replace(books, tokenizer="bpe"), VOCAB_SIZE)
    assert os.listdir(books.cache) == []
    for file in (root / "test").iterdir():
        file.rename(file.with_suffix(".text"))
    assert "test contains no books" in rejection(prepare, books)
    (root / "validation").rename(root / "valid")
    assert "validation does not exist; --data.path" in rejection(prepare, books)
