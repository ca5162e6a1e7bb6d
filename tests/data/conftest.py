"""Books to prepare, so that a corpus has files of every kind."""

import pytest

from transformer_vq.config import DataConfig
from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.tokenizers import train_sentencepiece

BOOK = b"".join(b"%d green bottles\n" % i for i in range(50))


@pytest.fixture(scope="session")
def book_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "books.model"
    train_sentencepiece([BOOK.decode()], 290, path)
    return path


@pytest.fixture
def books(tmp_path, book_model):
    """The config of books with a vocabulary, so that a corpus has files of every kind."""
    for split in SPLITS:
        (tmp_path / "books" / split).mkdir(parents=True)
        (tmp_path / "books" / split / "1.txt").write_bytes(BOOK)
        (tmp_path / "books" / split / "2.txt").write_bytes(BOOK[:300])
    return DataConfig("pg19", str(tmp_path / "books"), str(book_model), str(tmp_path / "cache"))
