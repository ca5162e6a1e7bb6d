"""Prepared corpora: written once, complete or not at all, and reused until the data changes."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
from data_helpers import CONTENT, rejection

from transformer_vq.data import corpus as corpus_module
from transformer_vq.data.corpus import Corpus, SplitSize, prepare
from transformer_vq.data.sources.base import SPLITS, Chunk, DataError


@dataclass
class RandomTokens:
    """A source with one document of random tokens per split."""

    vocab_size: int
    n_tokens: int = 100
    bos: int = 3
    has_words: bool = False
    n_bytes: int = 0
    splits: tuple[str, ...] = SPLITS
    error: BaseException | None = None
    """Raised in the middle of the train split."""

    def fingerprint(self):
        return [self.vocab_size]

    def setup(self, folder, work):
        (folder / "extra").write_text("stays")

    def chunks(self, split):
        tokens = self.tokens(split)
        half = self.n_tokens // 2
        yield Chunk(tokens[:half], True, 1)
        if self.error is not None:
            raise self.error
        yield Chunk(tokens[half:], False, 2)

    def tokens(self, split):
        generator = np.random.default_rng(SPLITS.index(split))
        tokens = generator.integers(0, self.vocab_size, self.n_tokens)
        tokens[0] = self.vocab_size - 1
        return tokens


@pytest.fixture
def random_tokens(monkeypatch):
    """Make `prepare` use random tokens."""

    def use(**fields):
        source = RandomTokens(**fields)
        monkeypatch.setattr(corpus_module, "source_from_config", lambda config, vocab_size: source)
        return source

    return use


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


def test_sizes_count_tokens_documents_bytes_and_words(text, tmp_path):
    size = prepare(text).sizes["train"]
    assert size == SplitSize(756, 1, 756, len(CONTENT[:756].split()))
    (tmp_path / "folder").mkdir()
    for i in range(20):
        (tmp_path / "folder" / f"{i}").write_text("two words\n")
    corpus = prepare(replace(text, path=str(tmp_path / "folder")))
    assert corpus.sizes == {
        "train": SplitSize(180, 18, 180, 36),
        "validation": SplitSize(10, 1, 10, 2),
        "test": SplitSize(10, 1, 10, 2),
    }
    assert corpus.split("train").starts.tolist() == list(range(0, 180, 10))
    assert corpus.split("train").size == corpus.sizes["train"]


def test_preparing_again_writes_nothing(text, capsys):
    first = prepare(text)
    before = state_of(first.folder)
    assert prepare(text) == first
    assert state_of(first.folder) == before
    assert capsys.readouterr().err == ""


def test_a_changed_file_gives_a_new_corpus(text, tmp_path):
    first = prepare(text)
    (tmp_path / "text").write_bytes(CONTENT + b"one more")
    second = prepare(text)
    assert second.folder != first.folder
    assert second.split("test").tokens.tobytes().endswith(b"one more")
    assert first.split("test").tokens.tobytes().endswith(b"49 green bottles\n")


def test_open_returns_the_prepared_corpus(text):
    corpus = prepare(text)
    assert Corpus.open(corpus.folder) == corpus


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_tokens_are_stored_in_the_smallest_dtype_for_the_vocabulary(
    text, random_tokens, vocab_size, dtype
):
    source = random_tokens(vocab_size=vocab_size)
    corpus = prepare(text, vocab_size)
    for name in SPLITS:
        tokens = corpus.split(name).tokens
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == dtype
        assert tokens.tolist() == source.tokens(name).tolist()


def test_chunks_of_a_document_are_joined(text, random_tokens):
    random_tokens(vocab_size=10)
    corpus = prepare(text, 10)
    assert corpus.split("train").starts.tolist() == [0]
    assert corpus.sizes["train"] == SplitSize(tokens=100, documents=1, bytes=3, words=None)
    assert (corpus.bos, corpus.split("test").bos) == (3, 3)
    assert (corpus.folder / "extra").read_text() == "stays"


def test_sha256_depends_on_the_tokens_and_not_on_their_path(text, tmp_path):
    first = prepare(text)
    copy = tmp_path / "copy"
    copy.write_bytes(CONTENT)
    second = prepare(replace(text, path=str(copy)))
    assert second.folder != first.folder
    assert second.sha256 == first.sha256
    copy.write_bytes(CONTENT[:-1] + b".")
    assert prepare(replace(text, path=str(copy))).sha256 != first.sha256


def test_sha256_depends_on_the_document_starts(text, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1").write_bytes(CONTENT[:100])
    (tmp_path / "folder" / "2").write_bytes(CONTENT[:100])
    (tmp_path / "text").write_bytes(CONTENT[:100] * 2)
    two, one = prepare(replace(text, path=str(tmp_path / "folder"))), prepare(text)
    assert two.split("train").tokens.tolist() == one.split("train").tokens.tolist()
    assert two.sha256 != one.sha256


def test_prepare_without_vocab_size_accepts_the_vocabulary_of_the_data(text):
    assert prepare(text) == prepare(text, 256)


def test_prepare_rejects_a_vocab_size_that_differs_from_the_data(text):
    assert rejection(prepare, text, 300) == (
        "text has a vocabulary of 256 tokens, but the model expects 300; "
        "set --model.vocab-size to 256"
    )


@pytest.mark.parametrize(("n", "split"), [(1, "validation"), (5, "test"), (10, "test")])
def test_prepare_rejects_too_few_bytes_for_three_splits(text, tmp_path, n, split):
    (tmp_path / "text").write_bytes(CONTENT[:n])
    assert rejection(prepare, text, 256) == (
        f"the {split} split of text would be empty: {n} bytes are too few for "
        "train, validation, test; use more data"
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_prepare_rejects_a_cache_that_is_a_file(text, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    message = rejection(prepare, text, 256)
    assert message.startswith(f"cannot write to {tmp_path}/cache: ")
    assert message.endswith("use another --data.cache")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), DataError("invalid"), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_an_interrupted_preparation_leaves_no_files(text, tmp_path, random_tokens, error):
    random_tokens(vocab_size=256, error=error)
    with pytest.raises(type(error)):
        prepare(text)
    assert list((tmp_path / "cache").iterdir()) == []
    source = random_tokens(vocab_size=256)
    assert prepare(text).split("train").tokens.tolist() == source.tokens("train").tolist()


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_files(text, tmp_path, random_tokens):
    random_tokens(vocab_size=256, error=OSError(28, "No space left on device"))
    message = rejection(prepare, text, 256)
    assert message.startswith(f"cannot write to {tmp_path}/cache: No space left on device; ")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_corpus_created_by_a_faster_process_is_used(text, tmp_path, monkeypatch):
    """The other process renames its corpus while this one still writes."""
    first = prepare(text)
    elsewhere = first.folder.rename(tmp_path / "elsewhere")
    write = corpus_module.write_corpus

    def write_too_late(*arguments):
        write(*arguments)
        elsewhere.rename(first.folder)

    monkeypatch.setattr(corpus_module, "write_corpus", write_too_late)
    before = state_of(elsewhere)[1:]
    assert prepare(text) == first
    assert state_of(first.folder)[1:] == before
    assert list((tmp_path / "cache").iterdir()) == [first.folder]


def test_split_rejects_unknown_names(text):
    corpus = prepare(text)
    assert list(corpus.sizes) == list(SPLITS)
    with pytest.raises(ValueError, match=r"unknown split 'valid'; choose one of train, validation"):
        corpus.split("valid")


def test_the_byte_tokenizer_of_a_corpus_round_trips(text):
    corpus = prepare(text)
    tokenizer = corpus.tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos) == (corpus.vocab_size, corpus.bos)
    assert tokenizer.decode(tokenizer.encode("caf\u00e9\n")) == "caf\u00e9\n".encode()
    assert tokenizer.encode(CONTENT.decode())[:756] == corpus.split("train").tokens.tolist()


class RecordingReporter:
    """Keeps what it receives."""

    def __init__(self):
        self.tasks, self.messages = [], []

    def progress(self, what, total, unit, done=0):
        self.tasks.append((what, total, unit))
        return nullcontext(lambda n, note="": None)

    def info(self, message):
        self.messages.append(message)

    warn = info


def test_prepare_reports_to_the_given_reporter(text, capsys):
    reporter = RecordingReporter()
    corpus = prepare(text, reporter=reporter)
    assert reporter.tasks == [
        ("reading", None, "B"),
        ("tokenizing", 840, "B"),
        ("writing text", 840, "B"),
    ]
    (corpus.folder / "train.bin").write_bytes(b"")
    prepare(text, reporter=reporter)
    (warning,) = reporter.messages
    assert str(corpus.folder) in warning
    assert capsys.readouterr().err == ""
