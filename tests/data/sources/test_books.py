"""Books in the folders of PG-19: one lossless document per book, for all line endings."""

import os
from dataclasses import replace

import pytest
import sentencepiece
from data_helpers import documents, rejection

from transformer_vq.config import DataConfig
from transformer_vq.data.corpus import prepare
from transformer_vq.data.sources.base import SPLITS

VOCAB_SIZE = 380


def book(seed: int, n_lines: int = 60) -> str:
    """Return similar but different lines, some of them indented or empty."""
    who = ["Alice", "the captain", "her sister", "an old man", "caf\u00e9 owners"]
    what = ["was walking to", "never left", "dreamed about", "wrote of"]
    where = ["the river", "London", "a garden", "the sea"]
    lines = []
    for i in range(seed, seed + n_lines):
        lines.append(f"{'  ' * (i % 2)}{who[i % 5]} {what[i // 2 % 4]} {where[i // 3 % 4]}, {i}.")
    return f"BOOK {seed}\n\n\n" + "\n".join(lines) + "\n"


BOOKS = {"train": range(5), "validation": (60, 70), "test": (80, 90)}


def write_books(root, end="\n"):
    for split, seeds in BOOKS.items():
        (root / split).mkdir(parents=True)
        for seed in seeds:
            text = book(seed).replace("\n", end)
            (root / split / f"{seed}.txt").write_bytes(text.encode())


def config_of(root):
    cache = str(root.parent / "cache")
    return DataConfig("pg19", str(root), end_of_document=False, cache=cache)


@pytest.fixture
def root(tmp_path):
    write_books(tmp_path / "books")
    return tmp_path / "books"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A vocabulary trained on the train split."""
    root = tmp_path_factory.mktemp("corpus") / "books"
    write_books(root)
    return prepare(config_of(root), VOCAB_SIZE).folder / "tokenizer.model"


@pytest.fixture
def books(root, model):
    """The config of the books with a given vocabulary."""
    return replace(config_of(root), tokenizer=str(model))


def test_each_book_is_one_lossless_document(books):
    corpus = prepare(books, VOCAB_SIZE)
    assert (corpus.vocab_size, corpus.bos) == (VOCAB_SIZE, 1)
    for split, seeds in BOOKS.items():
        texts = sorted(book(seed).encode() for seed in seeds)
        assert sorted(documents(corpus, split)) == texts
        size = corpus.sizes[split]
        assert size.bytes == sum(map(len, texts))
        assert size.words == sum(len(text.split()) for text in texts)


def test_tokens_are_those_of_sentencepiece(books, model):
    split = prepare(books, VOCAB_SIZE).split("validation")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    got = [split.tokens[: split.starts[1]].tolist(), split.tokens[split.starts[1] :].tolist()]
    assert sorted(got) == sorted(reference.encode(book(seed)) for seed in (60, 70))


def test_the_vocabulary_is_trained_on_the_train_split_only(root, model):
    (root / "test" / "80.txt").write_text("Quite other words, zebra zebra zebra.\n" * 90)
    corpus = prepare(config_of(root), VOCAB_SIZE)
    assert (corpus.folder / "tokenizer.model").read_bytes() == model.read_bytes()


def test_line_endings_do_not_change_the_tokens(root, tmp_path):
    write_books(tmp_path / "crlf", end="\r\n")
    lf, crlf = (prepare(config_of(path), VOCAB_SIZE) for path in (root, tmp_path / "crlf"))
    assert lf.folder != crlf.folder
    assert (lf.sha256, lf.sizes) == (crlf.sha256, crlf.sizes)
    assert lf.tokenizer_sha256 == crlf.tokenizer_sha256


def test_empty_and_hidden_files_and_other_files_are_skipped(root, books):
    (root / "train" / "0.txt").write_text("")
    (root / "train" / "._1.txt").write_bytes(b"\x00\x05\xff")
    (root / "train" / "notes.md").write_text("not a book")
    (root / "metadata.csv").write_text("id,title\n")
    assert prepare(books).sizes["train"].documents == 4


def test_a_missing_folder_is_rejected(tmp_path):
    message = rejection(prepare, config_of(tmp_path / "nowhere"))
    assert "nowhere does not exist; --data.path must contain the books" in message


def test_a_missing_split_is_rejected(root):
    (root / "validation").rename(root / "valid")
    message = rejection(prepare, config_of(root))
    assert "validation does not exist; --data.path must contain the books" in message


def test_a_split_without_books_is_rejected(root):
    for file in (root / "test").iterdir():
        file.rename(file.with_suffix(".text"))
    assert "test contains no books" in rejection(prepare, config_of(root))


def test_a_split_that_is_a_file_is_rejected(root):
    for file in (root / "test").iterdir():
        file.unlink()
    (root / "test").rmdir()
    (root / "test").write_text("a book")
    assert "test is not a folder" in rejection(prepare, config_of(root))


def test_a_book_that_is_not_utf8_is_rejected(root, books):
    (root / "train" / "2.txt").write_bytes("caf\u00e9".encode("latin-1"))
    assert "2.txt is not UTF-8" in rejection(prepare, books)
    assert "2.txt is not UTF-8" in rejection(prepare, config_of(root), VOCAB_SIZE)
    assert os.listdir(books.cache) == []


def test_a_vocabulary_that_is_too_large_is_rejected(root):
    message = rejection(prepare, config_of(root), 30_000)
    assert "set --model.vocab-size to at most" in message


def test_books_that_are_not_regular_files_are_skipped_with_a_warning(root, books, capsys):
    (root / "train" / "9.txt").symlink_to("nowhere.txt")
    os.mkfifo(root / "train" / "8.txt")
    assert prepare(books).sizes["train"].documents == 5
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "2 entries" in line]


def test_every_split_is_named(root):
    assert list(prepare(config_of(root), VOCAB_SIZE).sizes) == list(SPLITS)
