"""Prepared corpora: one pass, the same splits for every format, complete or resumed, verified."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import tokenizers
from data_helpers import CONTENT, documents, rejection, story

from transformer_vq.config import DataConfig
from transformer_vq.data import documents as module
from transformer_vq.data import prepare as preparing
from transformer_vq.data import text as reading
from transformer_vq.data.corpus import Corpus, SplitSize
from transformer_vq.data.documents import count_words
from transformer_vq.data.paths import SPLITS
from transformer_vq.data.prepare import prepare
from transformer_vq.data.text import Input
from transformer_vq.files import CorruptFileError

TEXTS = [f"Document {i}\n\n" + "".join(f"line {j} of {i}\n" for j in range(i)) for i in range(40)]


@pytest.fixture
def text(tmp_path):
    """The config of a text file with CONTENT."""
    (tmp_path / "text").write_bytes(CONTENT)
    return DataConfig(
        path=str(tmp_path / "text"), cache=str(tmp_path / "cache"), end_of_document=False
    )


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


def state_of(folder):
    """Return names, inodes and times, which change if anything in a folder is written again."""
    paths = [folder, *sorted(folder.iterdir())]
    return [(p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in paths]


def test_tokens_of_a_text_file_are_its_bytes(text):
    corpus = prepare(text)
    assert (corpus.dataset, corpus.vocab_size, corpus.bos) == ("text", 256, 0)
    splits = [corpus.split(name) for name in SPLITS]
    assert b"".join(split.tokens.tobytes() for split in splits) == CONTENT
    assert [len(split) for split in splits] == [756, 42, 42]  # 90, 5 and 5 percent of 840
    assert all(split.starts.tolist() == [0] for split in splits)
    assert corpus.sizes["train"] == SplitSize(756, 1, 756, len(CONTENT[:756].split()))
    assert Corpus.open(corpus.folder) == corpus == prepare(text, 256)


@pytest.mark.parametrize("options", [{}, {"end_of_document": False}, {"tokenizer": "bpe"}])
def test_every_format_gives_the_same_tokens(folder, jsonl, options, monkeypatch):
    monkeypatch.setattr(preparing, "MAX_LEARN_BYTES", 3000)  # fewer than there are
    size = 280 if "tokenizer" in options else None
    one = prepare(replace(folder, **options), size)
    other = prepare(replace(jsonl, **options), size)
    assert one.folder != other.folder
    assert (one.sha256, one.sizes) == (other.sha256, other.sizes)
    assert one.tokenizer_sha256 == other.tokenizer_sha256
    for name in SPLITS:
        assert (one.split(name).tokens == other.split(name).tokens).all()
        assert (one.split(name).starts == other.split(name).starts).all()
    assert sorted(all_documents(one)) == sorted(text.encode() for text in TEXTS)
    size, eod = one.sizes["train"], one.tokenizer().eod
    if eod is not None:
        split = one.split("train")
        ends = np.append(split.starts[1:], len(split)) - 1
        assert np.flatnonzero(split.tokens == eod).tolist() == ends.tolist()
    assert size.bytes == sum(map(len, documents(one, "train")))
    assert size.words == sum(len(text.split()) for text in documents(one, "train"))


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_single_document_is_divided_between_tokens(text, tmp_path, name):
    (tmp_path / "text").write_text(story())
    corpus = prepare(
        replace(text, tokenizer=name, end_of_document=True), 330 if name == "bpe" else None
    )
    assert b"".join(all_documents(corpus)) == story().encode()
    sizes = [corpus.sizes[name].bytes for name in SPLITS]
    assert sum(sizes) == len(story())
    assert abs(sizes[0] / sum(sizes) - 0.9) < 0.01
    assert abs(sizes[1] / sum(sizes) - 0.05) < 0.01
    assert [x.bytes for x in corpus.sizes.values()] == list(map(len, all_documents(corpus)))
    eod = corpus.tokenizer().eod
    ends = {name: int((corpus.split(name).tokens == eod).sum()) for name in SPLITS}
    assert ends == {"train": 0, "validation": 0, "test": 1}


def test_a_vocabulary_is_never_learned_from_held_out_text(text, tmp_path):
    held_out = "quite other words " * 40
    config = replace(text, tokenizer="bpe", validation_share=0.25, test_share=0.0)
    vocabularies = set()
    for end in (held_out, held_out.upper()):  # of a single document: it is divided
        (tmp_path / "text").write_text(story()[: 4 * len(held_out)] + end)
        vocabularies.add(prepare(config, 300).tokenizer_sha256)
    assert len(vocabularies) == 1


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
    assert "there is no test split, only train; set" in rejection(corpus.split, "test")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_interruption_loses_only_the_input_in_progress(folder, monkeypatch, tokenizer):
    config = replace(folder, tokenizer=tokenizer)
    vocab_size = 300 if tokenizer == "bpe" else None
    want = prepare(replace(config, cache=f"{config.cache}-other"), vocab_size)
    read, n_read, interrupt_at = Input.read, 0, 25 + (2 * len(TEXTS) if vocab_size else 0)

    def interrupt(item):
        nonlocal n_read
        if n_read == interrupt_at:
            raise KeyboardInterrupt
        n_read += 1
        yield from read(item)

    monkeypatch.setattr(module, "BATCH_CHARS", 100)
    monkeypatch.setattr(Input, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, vocab_size)
    (work,) = os.listdir(config.cache)
    assert work.endswith(".work")
    n_read, interrupt_at = 0, None
    corpus = prepare(config, vocab_size)
    assert (corpus.sha256, corpus.sizes) == (want.sha256, want.sizes)
    for name in SPLITS:
        assert (corpus.split(name).tokens == want.split(name).tokens).all()
    in_flight = 0 if tokenizer == "bytes" else 8  # in batches that were not written yet
    assert len(TEXTS) - 25 <= n_read <= len(TEXTS) - 25 + in_flight
    assert os.listdir(config.cache) == [corpus.folder.name]


def test_a_killed_preparation_is_resumed(folder, tmp_path):
    program = f"""
import os, signal
from transformer_vq.config import DataConfig
from transformer_vq.data import documents as module
from transformer_vq.data.prepare import prepare
from transformer_vq.data.text import Input
module.FLUSH_TOKENS = 100
read, n_read = Input.read, 0
def kill(item):
    global n_read
    n_read += 1
    if n_read == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from read(item)
Input.read = kill
prepare(DataConfig(path={folder.path!r}, cache={folder.cache!r}))
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    (work,) = (tmp_path / "cache").iterdir()
    assert (work / "tokens.bin").stat().st_size > 0
    with open(work / "tokens.bin", "ab") as file:
        file.write(b"a document in progress")
    corpus = prepare(folder)
    want = prepare(replace(folder, cache=str(tmp_path / "other")))
    assert corpus.sha256 == want.sha256
    assert all_documents(corpus) == all_documents(want)


def test_rejected_data_and_a_full_disk_leave_no_corpus(folder, tmp_path, monkeypatch):
    (tmp_path / "folder" / "bad.jsonl").write_text("{")
    assert "bad.jsonl, line 1" in rejection(prepare, folder)
    assert os.listdir(folder.cache) == []
    (tmp_path / "folder" / "bad.jsonl").unlink()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    message = rejection(prepare, folder)
    assert message.startswith(f"cannot write to {tmp_path}/cache: No space left on device; ")


def test_data_that_change_while_they_are_read_are_rejected(folder, monkeypatch, tmp_path):
    read = Input.read

    def change(item):
        (tmp_path / "folder" / "0.txt").write_text("quite another text")
        yield from read(item)

    monkeypatch.setattr(Input, "read", change)
    assert "changed while they were read" in rejection(prepare, folder)
    assert os.listdir(folder.cache) == []


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tokens.bin", lambda data: bytes([data[0] ^ 1]) + data[1:], "tokens.bin is corrupt"),
        ("tokens.bin", None, "tokens.bin"),
        ("train.npy", lambda data: data[:-5], "train.npy is corrupt"),
        ("meta.json", lambda data: data.replace(b"256", b"255"), "meta.json is corrupt"),
        ("meta.json", lambda data: b'{"format": 4}', "was written by another version"),
        ("manifest.json", None, "manifest.json"),
    ],
)
def test_a_damaged_corpus_is_rejected_and_prepared_again(text, name, damage, message, capsys):
    corpus = prepare(text)
    path = corpus.folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFileError, match=f"{corpus.folder}.*{message}.*delete it"):
        Corpus.open(corpus.folder)
    assert prepare(text) == corpus
    assert "preparing it again" in capsys.readouterr().err
    assert all_documents(prepare(text)) == all_documents(corpus)


def test_a_corpus_is_found_again_until_data_or_settings_change(folder, tmp_path, capsys):
    first = prepare(folder)
    prepare(folder)  # the clock of a file system is coarse: files are checked once more
    before = state_of(first.folder)
    (tmp_path / "folder").rename(tmp_path / "moved")
    moved = replace(folder, path=(str(tmp_path / "moved"),))
    assert prepare(moved) == first
    assert state_of(first.folder) == before
    assert capsys.readouterr().err == ""
    os.utime(tmp_path / "moved" / "0.txt", (0, 0))
    other = prepare(moved)
    assert (other.folder != first.folder, other.sha256) == (True, first.sha256)
    without_ends = prepare(replace(moved, end_of_document=False))
    assert without_ends.folder != other.folder
    assert without_ends.sha256 != first.sha256
    (tmp_path / "moved" / "0.txt").write_text("other")
    assert prepare(moved).sha256 != first.sha256


def test_two_processes_prepare_the_same_data_once(folder):
    program = f"""
from transformer_vq import DataConfig, prepare
print(prepare(DataConfig(path={folder.path!r}, cache={folder.cache!r})).folder)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)
    ]
    names = {child.communicate()[0] for child in children}
    assert len(names) == 1
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(os.listdir(folder.cache)) == 1


@pytest.mark.parametrize(("n", "split"), [(1, "validation"), (10, "test")])
def test_prepare_rejects_too_few_bytes_for_three_splits(text, tmp_path, n, split):
    (tmp_path / "text").write_bytes(CONTENT[:n])
    assert rejection(prepare, text, 256) == (
        f"the {split} split of text would be empty: {n} bytes are too few for "
        "train, validation, test; use more data"
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_lossy_tokenizer_is_reported(folder, tmp_path, capsys):
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1}, "[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.add_special_tokens(["</s>"])
    lossy.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(replace(folder, tokenizer=str(tmp_path / "tokenizer.json")))
    assert "the tokenizer changes the text" in capsys.readouterr().err
    assert sum(size.bytes for size in corpus.sizes.values()) == sum(map(len, TEXTS))


def test_empty_documents_are_skipped_and_counted(folder, tmp_path, capsys):
    (tmp_path / "folder" / "empty.txt").write_text("")
    assert len(all_documents(prepare(folder))) == len(TEXTS)
    assert "1 of 41 documents are empty" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    config = replace(folder, path=(str(tmp_path / "empty"),))
    for tokenizer in ("bytes", "bpe"):
        message = rejection(prepare, replace(config, tokenizer=tokenizer))
        assert message.startswith(f"{tmp_path}/empty is empty")


@pytest.mark.parametrize("size", [1, 1000])
def test_words_and_characters_across_chunks_are_counted_once(text, tmp_path, monkeypatch, size):
    monkeypatch.setattr(reading, "CHUNK", size)
    (tmp_path / "text").write_bytes("caf\u00e9 \u65e5\u672c  x\n".encode() * 100)
    config = replace(text, validation_share=0.0, test_share=0.0)
    assert prepare(config).sizes["train"].words == 300
    corpus = prepare(replace(config, tokenizer="bpe"), 260)
    assert documents(corpus, "train") == [(tmp_path / "text").read_bytes()]
    assert corpus.sizes["train"].words == 300
    assert count_words(b"a b", in_word=True) == (1, True)


def test_prepare_reports_to_the_given_reporter(text, capsys):
    reporter = MagicMock()
    corpus = prepare(text, reporter=reporter)
    assert reporter.progress.call_args.args[0] == "preparing text"
    (corpus.folder / "tokens.bin").write_bytes(b"")
    prepare(text, reporter=reporter)
    assert str(corpus.folder) in reporter.warn.call_args.args[0]
    assert capsys.readouterr().err == ""
