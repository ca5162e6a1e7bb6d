"""The source that a config selects, and a corpus prepared from each dataset."""

import gzip
import os

import numpy as np
import pytest
from data_helpers import CONTENT, documents, rejection
from PIL import Image

from transformer_vq.config import DataConfig
from transformer_vq.data.corpus import SplitSize, prepare
from transformer_vq.data.sources import selection
from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.images import ImageFolder
from transformer_vq.data.sources.selection import source_from_config


def test_text_without_a_path_selects_the_python_sources(text, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "python_sources", lambda: [tmp_path / "text"])
    corpus = prepare(DataConfig(cache=text.cache))
    assert b"".join(documents(corpus, name)[0] for name in SPLITS) == CONTENT


def test_a_compressed_enwik8_of_another_size_is_prepared_with_a_warning(tmp_path, capsys):
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(CONTENT))
    cache = str(tmp_path / "cache")
    config = DataConfig("enwik8", path=str(tmp_path), end_of_document=False, cache=cache)
    corpus = prepare(config)
    assert corpus.folder.name.startswith("enwik8-")
    assert corpus.split("train").tokens.tobytes() == CONTENT[:756]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "has 840 bytes instead of the 100,000,000 of enwik8" in warning


def test_books_are_prepared_with_a_learned_or_given_vocabulary(tmp_path):
    for name in SPLITS:
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / "1.txt").write_bytes(CONTENT)
        (tmp_path / "books" / name / "2.txt").write_bytes(CONTENT[:300])
    config = DataConfig("pg19", path=str(tmp_path / "books"), cache=str(tmp_path / "cache"))
    corpus = prepare(config, 290)
    tokenizer = corpus.tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos) == (290, corpus.bos)
    split = corpus.split("test")
    assert split.tokens.dtype == np.uint16
    assert split.size.documents == len(split.starts) == 2
    assert split.size.bytes == len(CONTENT) + 300
    assert split.size.words == len(CONTENT.split()) + len(CONTENT[:300].split())
    assert sorted(documents(corpus, "test")) == sorted([CONTENT, CONTENT[:300]])
    given = DataConfig(
        "pg19", config.path, tokenizer=str(corpus.folder / "tokenizer.model"), cache=config.cache
    )
    assert prepare(given, 290).split("test").tokens.tolist() == split.tokens.tolist()


def test_imagenet64_is_prepared_with_one_document_per_image(tmp_path, capsys):
    rows = np.random.default_rng(0).integers(0, 256, (22, 12288), dtype=np.uint8)
    np.savez(tmp_path / "train_data_batch_1.npz", data=rows[:20])
    np.savez(tmp_path / "val_data.npz", data=rows[20:])
    config = DataConfig("imagenet64", path=str(tmp_path), cache=str(tmp_path / "cache"))
    assert isinstance(source_from_config(config, 256), ImageNet64)
    corpus = prepare(config)
    assert [size.documents for size in corpus.sizes.values()] == [19, 1, 2]
    assert corpus.sizes["test"] == SplitSize(2 * 12288, 2, 2 * 12288, None)
    split = corpus.split("test")
    assert split.starts.tolist() == [0, 12288]
    assert split.tokens[:3].tolist() == rows[20, [0, 4096, 8192]].tolist()
    assert "results cannot be compared" in capsys.readouterr().err


def test_images_are_prepared_and_no_temporary_files_remain(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.new("RGB", (64, 64), (i, 2 * i, 3 * i)).save(tmp_path / "images" / f"{i}.png")
    config = DataConfig("images", path=str(tmp_path / "images"), cache=str(tmp_path / "cache"))
    assert isinstance(source_from_config(config, 256), ImageFolder)
    corpus = prepare(config)
    assert [size.documents for size in corpus.sizes.values()] == [2, 1, 1]
    pixels = np.concatenate([corpus.split(name).tokens for name in SPLITS]).reshape(4, 4096, 3)
    order = pixels[:, 0, 0].argsort()
    assert (pixels[order] == np.arange(4)[:, None, None] * np.array([1, 2, 3])).all()
    assert os.listdir(tmp_path / "cache") == [corpus.folder.name]


@pytest.mark.parametrize("dataset", ["pg19", "imagenet64", "images"])
def test_datasets_without_a_download_need_a_path(tmp_path, dataset):
    assert rejection(prepare, DataConfig(dataset, cache=str(tmp_path)), 256) == (
        f"{dataset} is not downloaded automatically; give its folder as --data.path"
    )


def test_enwik8_without_a_path_must_be_downloaded_first(tmp_path):
    config = DataConfig("enwik8", cache=str(tmp_path))
    assert "run `tvq prepare enwik8`" in rejection(prepare, config, 256)
