"""Configs of data to prepare: a text file, and books, whose corpus has files of every kind."""

import pytest
from data_helpers import CONTENT
from sentencepiece_models import train_sentencepiece

from transformer_vq.config import DataConfig
from transformer_vq.data.paths import SPLITS


@pytest.fixture
def text(tmp_path):
    """The config of a text file with CONTENT."""
    (tmp_path / "text").write_bytes(CONTENT)
    return DataConfig(
        path=str(tmp_path / "text"), cache=str(tmp_path / "cache"), end_of_document=False
    )


@pytest.fixture(scope="session")
def book_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "books.model"
    train_sentencepiece([CONTENT.decode()], 290, path)
    return path


@pytest.fixture
def books(tmp_path, book_model):
    """The config of books with a given vocabulary."""
    for split in SPLITS:
        (tmp_path / "books" / split).mkdir(parents=True)
        (tmp_path / "books" / split / "1.txt").write_bytes(CONTENT)
        (tmp_path / "books" / split / "2.txt").write_bytes(CONTENT[:300])
    return DataConfig(
        "pg19",
        str(tmp_path / "books"),
        tokenizer=str(book_model),
        end_of_document=False,
        cache=str(tmp_path / "cache"),
    )
