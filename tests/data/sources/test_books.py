"""Books in the folders of PG-19: one lossless document per book, for all line endings."""

import itertools
import os
import threading

import numpy as np
import pytest
import sentencepiece

from transformer_vq.data.sources import books as module
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.books import Books

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


def write_books(root, end="\n"):
    """Write five training books, and two books in each of the other splits."""
    for split, seeds in {"train": range(5), "validation": (60, 70), "test": (80, 90)}.items():
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
    """A vocabulary trained on the train split."""
    folder = tmp_path_factory.mktemp("corpus")
    write_books(folder / "books")
    Books.from_folder(folder / "books", VOCAB_SIZE).setup(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["books", "tokenizer.model"]
    return folder / "tokenizer.model"


def test_each_book_is_one_lossless_document(root, model):
    source = Books.from_folder(root, VOCAB_SIZE, model)
    for split in SPLITS:
        texts = [file.read_bytes() for file in sorted((root / split).iterdir())]
        chunks = list(source.chunks(split))
        assert all(chunk.starts_document for chunk in chunks)
        assert [source.tokenizer.decode(chunk.tokens) for chunk in chunks] == texts
        assert [chunk.n_bytes for chunk in chunks] == [len(text) for text in texts]


def test_a_learned_vocabulary_has_the_requested_size(root, model, tmp_path):
    source = Books.from_folder(root, VOCAB_SIZE)
    assert (source.vocab_size, source.bos, source.has_words) == (VOCAB_SIZE, 1, True)
    (tmp_path / "corpus").mkdir()
    source.setup(tmp_path / "corpus")
    assert (tmp_path / "corpus" / "tokenizer.model").read_bytes() == model.read_bytes()
    assert source.tokenizer.vocab_size == VOCAB_SIZE
    assert max(chunk.tokens.max() for chunk in source.chunks("train")) < VOCAB_SIZE


def test_the_vocabulary_is_trained_on_the_train_split_only(root, model, tmp_path):
    (root / "test" / "80.txt").write_text("Quite other words, zebra zebra zebra.\n" * 90)
    Books.from_folder(root, VOCAB_SIZE).setup(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model.read_bytes()


def test_a_given_model_is_copied_and_used(root, model, tmp_path):
    source = Books.from_folder(root, 99, model)
    assert source.vocab_size == VOCAB_SIZE
    source.setup(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model.read_bytes()
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    got = [chunk.tokens.tolist() for chunk in source.chunks("validation")]
    assert got == [reference.encode(book(seed)) for seed in (60, 70)]


def test_line_endings_do_not_change_the_tokens(root, model, tmp_path):
    write_books(tmp_path / "crlf", end="\r\n")
    lf = Books.from_folder(root, VOCAB_SIZE, model)
    crlf = Books.from_folder(tmp_path / "crlf", VOCAB_SIZE, model)
    assert crlf.n_bytes > lf.n_bytes
    for split in SPLITS:
        for one, other in zip(lf.chunks(split), crlf.chunks(split), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert (one.n_bytes, one.n_words) == (other.n_bytes, other.n_words)
    crlf = Books.from_folder(tmp_path / "crlf", VOCAB_SIZE)
    crlf.setup(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model.read_bytes()


def test_words_and_bytes_match_a_manual_count(root, model):
    text = "\tOne  two\u00a0two\r\nthree\rfour --\n\n5 caf\u00e9\u2003x\x0b\x0cend"
    (root / "test" / "7.txt").write_bytes(text.encode())
    source = Books.from_folder(root, VOCAB_SIZE, model)
    chunk = next(source.chunks("test"))
    # One, two..two, three, four, --, 5, cafe..x, end: only ASCII white space separates words
    assert chunk.n_words == 8
    assert chunk.n_bytes == len(text.encode()) - 1
    assert source.tokenizer.decode(chunk.tokens) == text.replace("\r\n", "\n").encode()


def test_empty_and_hidden_files_are_skipped(root, model):
    (root / "train" / "0.txt").write_text("")
    (root / "train" / "._1.txt").write_bytes(b"\x00\x05\xff")
    (root / "train" / "notes.md").write_text("not a book")
    (root / "metadata.csv").write_text("id,title\n")
    assert len(list(Books.from_folder(root, VOCAB_SIZE, model).chunks("train"))) == 4


def test_a_missing_folder_is_rejected(tmp_path):
    with pytest.raises(
        DataError, match=r"nowhere does not exist; --data\.path must contain the books"
    ):
        Books.from_folder(tmp_path / "nowhere", VOCAB_SIZE)


def test_a_missing_split_is_rejected(root):
    (root / "validation").rename(root / "valid")
    with pytest.raises(
        DataError, match=r"validation does not exist; --data\.path must contain the books"
    ):
        Books.from_folder(root, VOCAB_SIZE)


def test_a_split_without_books_is_rejected(root):
    for file in (root / "test").iterdir():
        file.rename(file.with_suffix(".text"))
    with pytest.raises(
        DataError, match=r"test contains no books; --data\.path must contain the books"
    ):
        Books.from_folder(root, VOCAB_SIZE)


def test_a_book_that_is_not_utf8_is_rejected(root, model, tmp_path):
    (root / "train" / "2.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(DataError, match=r"2\.txt is not UTF-8"):
        list(Books.from_folder(root, VOCAB_SIZE, model).chunks("train"))
    with pytest.raises(DataError, match=r"2\.txt is not UTF-8"):
        Books.from_folder(root, VOCAB_SIZE).setup(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["books"]


def test_a_book_deleted_while_reading_is_reported(root, model):
    source = Books.from_folder(root, VOCAB_SIZE, model)
    (root / "train" / "3.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*3\.txt: No such file"):
        list(source.chunks("train"))


def test_a_vocabulary_that_is_too_large_is_rejected(root, tmp_path):
    with pytest.raises(DataError, match=r"set --model\.vocab-size to at most \d+$"):
        Books.from_folder(root, 30_000).setup(tmp_path)


def test_the_fingerprint_depends_on_books_and_vocabulary(root, model):
    first = Books.from_folder(root, VOCAB_SIZE).fingerprint()
    assert first == Books.from_folder(root, VOCAB_SIZE).fingerprint()
    assert first[1] == "learned"
    given = Books.from_folder(root, VOCAB_SIZE, model).fingerprint()
    assert given[0] == first[0]
    assert len(given[1]) == 64
    (root / "test" / "80.txt").write_text("Another ending.\n")
    assert Books.from_folder(root, VOCAB_SIZE).fingerprint()[0] != first[0]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_the_number_of_threads_does_not_change_the_tokens(root, model, n_threads, monkeypatch):
    monkeypatch.setattr(module, "N_THREADS", n_threads)
    tokens = [chunk.tokens for chunk in Books.from_folder(root, VOCAB_SIZE, model).chunks("train")]
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert [t.tolist() for t in tokens] == [reference.encode(book(seed)) for seed in range(5)]


def test_only_a_few_books_are_in_memory_at_once():
    started, n_threads = [], threading.active_count()
    results = module._map_in_order(lambda file: started.append(file) or file, list(range(100)), 2)
    assert list(itertools.islice(results, 10)) == list(range(10))
    assert len(started) <= 10 + 2 * 2 + 1
    results.close()
    assert threading.active_count() == n_threads


def test_a_split_that_is_a_file_is_rejected(root):
    for file in (root / "test").iterdir():
        file.unlink()
    (root / "test").rmdir()
    (root / "test").write_text("a book")
    with pytest.raises(DataError, match="test is not a folder"):
        Books.from_folder(root, VOCAB_SIZE)


def test_books_that_are_not_regular_files_are_skipped_with_a_warning(root, model, capsys):
    (root / "train" / "9.txt").symlink_to("nowhere.txt")
    os.mkfifo(root / "train" / "8.txt")
    assert len(Books.from_folder(root, VOCAB_SIZE, model).files["train"]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 entries" in line
