"""Standard input as data: stored once, named after its content."""

import io
import sys
from pathlib import Path

import pytest
from data_helpers import CONTENT, documents, rejection

from transformer_vq.config import DataConfig
from transformer_vq.data.corpus import prepare
from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.sources.stdin import store_stdin


@pytest.fixture
def stdin(monkeypatch):
    """Set the content of standard input."""

    def use(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return use


def test_standard_input_is_prepared_like_a_file(tmp_path, stdin):
    stdin(CONTENT)
    config = DataConfig(path="-", cache=str(tmp_path), end_of_document=False)
    corpus = prepare(config)
    assert b"".join(documents(corpus, name)[0] for name in SPLITS) == CONTENT
    stdin(CONTENT)
    assert prepare(config).folder == corpus.folder


def test_the_format_of_standard_input_is_recognized(tmp_path, stdin):
    stdin(b"".join(b'{"text": "document %d"}\n' % i for i in range(100)))
    corpus = prepare(DataConfig(path="-", cache=str(tmp_path)))
    assert sum(size.documents for size in corpus.sizes.values()) == 100


def test_other_paths_are_kept(tmp_path, stdin):
    stdin(CONTENT)
    stored = store_stdin(DataConfig(path=("a", "-", "b"), test_path="c"), tmp_path)
    assert (stored.path[0], stored.path[2], stored.test_path) == ("a", "b", ("c",))
    assert Path(stored.path[1]).read_bytes() == CONTENT
    config = DataConfig(path="a")
    assert store_stdin(config, tmp_path) is config


def test_standard_input_can_be_given_once(tmp_path):
    config = DataConfig(path="-", test_path="-")
    assert "only once" in rejection(store_stdin, config, tmp_path)


def test_several_processes_cannot_share_standard_input(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "store it in a file" in rejection(store_stdin, DataConfig(path="-"), tmp_path)
