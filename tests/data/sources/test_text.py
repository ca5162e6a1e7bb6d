"""Text of any format as documents: order, splits, tokens, and preparations that resume."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from data_helpers import CONTENT, documents, rejection, story

from transformer_vq.config import DataConfig
from transformer_vq.data import shards, temporary
from transformer_vq.data.corpus import prepare
from transformer_vq.data.sources import compression
from transformer_vq.data.sources import text as module
from transformer_vq.data.sources.base import SPLITS
from transformer_vq.data.sources.text import python_sources

TEXTS = [f"Document {i}\n\n" + "".join(f"line {j} of {i}\n" for j in range(i)) for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    """The config of a folder with TEXTS."""
    (tmp_path / "folder" / "below").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        name = f"below/{i}.md" if i % 2 else f"{i}.txt"
        (tmp_path / "folder" / name).write_text(text)
    return DataConfig(path=str(tmp_path / "folder"), cache=str(tmp_path / "cache"))


@pytest.fixture
def jsonl(tmp_path, folder):
    """The config of a JSONL file with TEXTS in another order."""
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "data.jsonl").write_text("\n".join(reversed(lines)))
    return replace(folder, path=(str(tmp_path / "data.jsonl"),))


def all_documents(corpus):
    return [text for split in corpus.sizes for text in documents(corpus, split)]


@pytest.mark.parametrize(
    "options",
    [{}, {"end_of_document": False}, {"tokenizer": "bpe"}, {"tokenizer": "sentencepiece"}],
)
def test_every_format_gives_the_same_tokens(folder, jsonl, options):
    size = 300 if "tokenizer" in options else None
    one = prepare(replace(folder, **options), size)
    other = prepare(replace(jsonl, **options), size)
    assert one.sha256 == other.sha256
    assert one.tokenizer_sha256 == other.tokenizer_sha256
    assert one.folder != other.folder
    assert sorted(all_documents(one)) == sorted(text.encode() for text in TEXTS)
    size = one.sizes["train"]
    assert size.bytes == sum(map(len, documents(one, "train")))
    assert size.words == sum(len(text.split()) for text in documents(one, "train"))


def test_an_end_of_document_token_follows_each_document(folder):
    corpus = prepare(folder)
    assert (corpus.vocab_size, corpus.bos, corpus.tokenizer().eod) == (257, 256, 256)
    for name in SPLITS:
        split = corpus.split(name)
        ends = np.append(split.starts[1:], len(split)) - 1
        assert (split.tokens[ends] == 256).all()
        assert np.count_nonzero(split.tokens == 256) == len(ends)
        assert split.size.tokens == split.size.bytes + split.size.documents
    plain = prepare(replace(folder, end_of_document=False))
    assert plain.vocab_size == 256
    assert plain.sizes["train"].tokens == plain.sizes["train"].bytes


def test_a_divided_document_has_one_end(text):
    corpus = prepare(replace(text, end_of_document=True))
    ends = {name: (corpus.split(name).tokens == 256).sum() for name in SPLITS}
    assert ends == {"train": 0, "validation": 0, "test": 1}
    assert b"".join(all_documents(corpus)) == CONTENT


def test_explicit_splits_are_used_as_they_are(tmp_path, folder):
    for name in ("valid", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"only {name}"}))
    config = replace(
        folder,
        validation_path=(str(tmp_path / "valid.jsonl"),),
        test_path=(str(tmp_path / "test.jsonl"),),
    )
    corpus = prepare(config)
    assert documents(corpus, "validation") == [b"only valid"]
    assert documents(corpus, "test") == [b"only test"]
    assert sorted(documents(corpus, "train")) == sorted(text.encode() for text in TEXTS)


def test_shares_of_zero_leave_everything_for_training(folder):
    corpus = prepare(replace(folder, validation_share=0.0, test_share=0.0))
    assert list(corpus.sizes) == ["train"]
    assert len(documents(corpus, "train")) == len(TEXTS)
    assert "these data have no test split; set --data.test-share" in rejection(corpus.split, "test")


def test_parts_with_weights_stay_together(tmp_path, folder):
    (tmp_path / "other.txt").write_text(story())
    corpus = prepare(
        replace(folder, path=(*folder.path, str(tmp_path / "other.txt")), weights=(2, 1))
    )
    split = corpus.split("train")
    first, second = split.parts
    assert first + second == len(split)
    assert bytes(split.tokens[first:].tolist()) == story().encode()[:second]
    assert set(documents(corpus, "train")[:-1]) <= {text.encode() for text in TEXTS}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_interrupted_preparation_resumes(folder, monkeypatch, tokenizer):
    config = replace(folder, tokenizer=tokenizer)
    vocab_size = 300 if tokenizer == "bpe" else None
    monkeypatch.setattr(compression, "CHUNK", 37)  # words span pieces
    want = prepare(config, vocab_size)
    for name in os.listdir(config.cache):
        os.rename(os.path.join(config.cache, name), f"{config.cache}-{name}")
    monkeypatch.setattr(shards, "SHARD_BYTES", 300)
    monkeypatch.setattr(shards, "BATCH_BYTES", 500)
    n_encoded = 0
    count_words = shards.count_words

    def count(*arguments):
        nonlocal n_encoded
        n_encoded += 1
        if n_encoded == 25:
            raise KeyboardInterrupt
        return count_words(*arguments)

    monkeypatch.setattr(shards, "count_words", count)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, vocab_size)
    assert [name for name in os.listdir(config.cache) if name.endswith(".work")]
    scanned, learned, found = [], [], []
    complete_shards = shards._complete_shards

    def count_shards(folder):
        done = complete_shards(folder)
        found.append(len(done))
        return done

    monkeypatch.setattr(shards, "_complete_shards", count_shards)
    monkeypatch.setattr(module, "scan_documents", lambda *_: scanned.append(1))
    monkeypatch.setattr(module, "learn_tokenizer", lambda *_: learned.append(1))
    corpus = prepare(config, vocab_size)
    assert (corpus.sha256, corpus.sizes) == (want.sha256, want.sizes)
    assert 0 < found[-1] < 30
    assert (scanned, learned) == ([], [])
    assert os.listdir(config.cache) == [corpus.folder.name]


def test_a_word_at_the_place_of_the_interruption_is_counted_once(text, tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"x" * 3000)
    monkeypatch.setattr(compression, "CHUNK", 37)
    monkeypatch.setattr(shards, "SHARD_BYTES", 300)
    write_shard = shards.ShardWriter._write_shard

    def interrupt_the_third(writer, *arguments):
        if len(writer._shards) == 2:
            raise KeyboardInterrupt
        return write_shard(writer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "_write_shard", interrupt_the_third)
        with pytest.raises(KeyboardInterrupt):
            prepare(text)
    assert [size.words for size in prepare(text).sizes.values()] == [1, 1, 1]


def test_old_work_folders_are_deleted(folder, tmp_path):
    old = tmp_path / "cache" / ".text-0123456789abcdef.work"
    new = tmp_path / "cache" / ".text-fedcba9876543210.work"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "00000.bin").write_text("x")
    os.utime(old, (0, 0))
    prepare(folder)
    assert not old.exists()
    assert new.exists()
    assert temporary.MAX_AGE > 24 * 3600


def test_data_that_change_while_they_are_read_are_rejected(folder, monkeypatch, tmp_path):
    scan = module.scan_documents

    def scan_and_change(*arguments):
        found = scan(*arguments)
        (tmp_path / "folder" / "0.txt").write_text("quite another text")
        return found

    monkeypatch.setattr(module, "scan_documents", scan_and_change)
    assert "changed while they were read" in rejection(prepare, folder)
    assert os.listdir(folder.cache) == []


def test_a_lossy_tokenizer_is_reported(folder, tmp_path, capsys):
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1}, "[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.add_special_tokens(["</s>"])
    lossy.save(str(tmp_path / "tokenizer.json"))
    prepare(replace(folder, tokenizer=str(tmp_path / "tokenizer.json")))
    assert "100.0% of the checked segments differ" in capsys.readouterr().err


def test_empty_documents_are_skipped_and_counted(folder, tmp_path, capsys):
    (tmp_path / "folder" / "empty.txt").write_text("")
    corpus = prepare(folder)
    assert len(all_documents(corpus)) == len(TEXTS)
    assert "1 of 41 documents are empty" in capsys.readouterr().err


def test_a_path_without_text_is_rejected(tmp_path, folder):
    (tmp_path / "empty").write_text("")
    config = replace(folder, path=(str(tmp_path / "empty"),))
    assert rejection(prepare, config).startswith(f"{tmp_path}/empty is empty")


def test_the_fingerprint_depends_on_content_names_times_and_settings(folder, tmp_path):
    names = {prepare(folder).folder.name}
    for options in (
        {"end_of_document": False},
        {"validation_share": 0.1},
        {"test_path": folder.path},
        {"format": "text"},
    ):
        names.add(prepare(replace(folder, **options)).folder.name)
    os.utime(tmp_path / "folder" / "0.txt", (0, 0))
    names.add(prepare(folder).folder.name)
    (tmp_path / "folder" / "0.txt").rename(tmp_path / "folder" / "other.txt")
    names.add(prepare(folder).folder.name)
    assert len(names) == 6  # --data.format text is what is recognized anyway


def test_a_moved_folder_is_not_prepared_again(folder, tmp_path):
    first = prepare(folder)
    (tmp_path / "folder").rename(tmp_path / "moved")
    assert prepare(replace(folder, path=(str(tmp_path / "moved"),))).folder == first.folder


def test_python_sources_are_hundreds_of_files_without_tests():
    files = python_sources()
    assert len(files) > 300
    assert any(file.name == "argparse.py" for file in files)
    for file in files:
        assert file.suffix == ".py"
        assert not set(file.parts) & {"test", "tests", "idle_test", "site-packages"}
