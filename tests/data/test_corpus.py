"""Prepared corpora: made once, whole or not at all, from every kind of material."""

import gzip
import os
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from transformer_vq.config import DataConfig
from transformer_vq.data import corpus as corpora
from transformer_vq.data.corpus import Corpus, SplitSize, find_source, prepare
from transformer_vq.data.sources.base import SPLITS, Chunk, DataError
from transformer_vq.data.sources.books import Books
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.images import ImageFolder
from transformer_vq.data.sources.text import ByteFiles

CONTENT = b"".join(b"%d green bottles\n" % i for i in range(50))


@dataclass
class Numbers:
    """Material that is made up: a document of random tokens per split."""

    vocab_size: int
    n_tokens: int = 100
    bos: int = 3
    has_words: bool = False
    n_bytes: int = 0
    error: BaseException | None = None
    """Raised after half of the train split."""

    def fingerprint(self):
        return [self.vocab_size]

    def setup(self, folder):
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
def numbers(monkeypatch):
    """Make `prepare` take made-up material."""

    def use(**facts):
        source = Numbers(**facts)
        monkeypatch.setattr(corpora, "find_source", lambda config, vocab_size: source)
        return source

    return use


@pytest.fixture
def text(tmp_path):
    """The config of a text file."""
    (tmp_path / "text").write_bytes(CONTENT)
    return DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))


def state_of(folder):
    """What would change if anything in a folder were written again."""
    paths = [folder, *sorted(folder.iterdir())]
    return [(p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in paths]


def refusal(config, vocab_size=256):
    """The one line with which a config is refused."""
    with pytest.raises(DataError) as raised:
        prepare(config, vocab_size)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_tokens_of_a_file_are_its_bytes(text):
    corpus = prepare(text)
    assert (corpus.dataset, corpus.vocab_size, corpus.bos) == ("text", 256, 0)
    splits = [corpus.split(name) for name in SPLITS]
    assert b"".join(split.tokens.tobytes() for split in splits) == CONTENT
    assert [len(split) for split in splits] == [756, 42, 42]  # 90, 5 and 5 percent of 840
    assert all(split.starts.tolist() == [0] for split in splits)


def test_sizes_say_how_much_there_is(text, tmp_path):
    size = prepare(text).sizes["train"]
    assert size == SplitSize(756, 1, 756, len(CONTENT[:756].split()))
    (tmp_path / "folder").mkdir()
    for i in range(20):
        (tmp_path / "folder" / f"{i}").write_text("two words\n")
    corpus = prepare(DataConfig(path=str(tmp_path / "folder"), cache=text.cache))
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


def test_a_changed_file_makes_a_new_corpus(text, tmp_path):
    first = prepare(text)
    (tmp_path / "text").write_bytes(CONTENT + b"one more")
    second = prepare(text)
    assert second.folder != first.folder
    assert second.split("test").tokens.tobytes().endswith(b"one more")
    assert first.split("test").tokens.tobytes().endswith(b"49 green bottles\n")


def test_what_is_prepared_can_be_opened_by_its_folder(text):
    corpus = prepare(text)
    assert Corpus.open(corpus.folder) == corpus


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_tokens_lie_in_the_smallest_numbers_that_hold_the_vocabulary(
    text, numbers, vocab_size, dtype
):
    source = numbers(vocab_size=vocab_size)
    corpus = prepare(text, vocab_size)
    for name in SPLITS:
        tokens = corpus.split(name).tokens
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == dtype
        assert tokens.tolist() == source.tokens(name).tolist()


def test_pieces_of_a_document_are_joined(text, numbers):
    numbers(vocab_size=10)
    corpus = prepare(text, 10)
    assert corpus.split("train").starts.tolist() == [0]
    assert corpus.sizes["train"] == SplitSize(tokens=100, documents=1, bytes=3, words=None)
    assert (corpus.bos, corpus.split("test").bos) == (3, 3)
    assert (corpus.folder / "extra").read_text() == "stays"


def test_the_same_tokens_from_elsewhere_are_told_by_their_hash(text, tmp_path):
    first = prepare(text)
    copy = tmp_path / "copy"
    copy.write_bytes(CONTENT)
    second = prepare(DataConfig(path=str(copy), cache=text.cache))
    assert second.folder != first.folder
    assert second.sha256 == first.sha256
    copy.write_bytes(CONTENT[:-1] + b".")
    assert prepare(DataConfig(path=str(copy), cache=text.cache)).sha256 != first.sha256


def test_the_same_bytes_in_other_documents_have_another_hash(text, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1").write_bytes(CONTENT[:100])
    (tmp_path / "folder" / "2").write_bytes(CONTENT[:100])
    (tmp_path / "text").write_bytes(CONTENT[:100] * 2)
    two, one = prepare(DataConfig(path=str(tmp_path / "folder"), cache=text.cache)), prepare(text)
    assert two.split("train").tokens.tolist() == one.split("train").tokens.tolist()
    assert two.sha256 != one.sha256


def test_without_a_size_the_vocabulary_is_that_of_the_material(text):
    assert prepare(text) == prepare(text, 256)


def test_another_vocabulary_than_the_model_expects_is_refused(text):
    assert refusal(text, 300) == (
        "text has a vocabulary of 256 tokens, the model one of 300; set --model.vocab-size to 256"
    )


@pytest.mark.parametrize(("n", "split"), [(1, "validation"), (5, "test"), (10, "test")])
def test_too_few_bytes_for_three_splits_are_refused(text, tmp_path, n, split):
    (tmp_path / "text").write_bytes(CONTENT[:n])
    assert refusal(text) == (
        f"the {split} split of text would be empty: {n} bytes are too few to be divided into "
        "train, validation and test"
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_is_a_file_is_refused(text, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    message = refusal(text)
    assert message.startswith(f"cannot write to {tmp_path}/cache: ")
    assert message.endswith("use another --data.cache")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), DataError("unfit"), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_an_interrupted_preparation_leaves_nothing_behind(text, tmp_path, numbers, error):
    numbers(vocab_size=256, error=error)
    with pytest.raises(type(error)):
        prepare(text)
    assert list((tmp_path / "cache").iterdir()) == []
    source = numbers(vocab_size=256)
    assert prepare(text).split("train").tokens.tolist() == source.tokens("train").tolist()


def test_a_full_disk_is_named_in_one_line_and_leaves_nothing_behind(text, tmp_path, numbers):
    numbers(vocab_size=256, error=OSError(28, "No space left on device"))
    message = refusal(text)
    assert message.startswith(f"cannot write to {tmp_path}/cache: No space left on device; ")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_may_be_faster(text, tmp_path, monkeypatch):
    """It renames its corpus into place while this one still writes."""
    first = prepare(text)
    elsewhere = first.folder.rename(tmp_path / "elsewhere")
    write = corpora._write

    def overtaken(*arguments):
        write(*arguments)
        elsewhere.rename(first.folder)

    monkeypatch.setattr(corpora, "_write", overtaken)
    before = state_of(elsewhere)[1:]
    assert prepare(text) == first
    assert state_of(first.folder)[1:] == before
    assert list((tmp_path / "cache").iterdir()) == [first.folder]


def test_there_are_three_splits(text):
    corpus = prepare(text)
    assert list(corpus.sizes) == list(SPLITS)
    with pytest.raises(ValueError, match=r"no split 'valid'; choose one of train, validation, te"):
        corpus.split("valid")


def test_the_tokenizer_of_bytes_goes_there_and_back(text):
    corpus = prepare(text)
    tokenizer = corpus.tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos) == (corpus.vocab_size, corpus.bos)
    assert tokenizer.decode(tokenizer.encode("caf\u00e9\n")) == "caf\u00e9\n".encode()
    assert tokenizer.encode(CONTENT.decode())[:756] == corpus.split("train").tokens.tolist()


def test_without_a_path_text_is_the_sources_of_python(text, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "python_sources", lambda: (tmp_path, [tmp_path / "text"]))
    source = find_source(DataConfig(cache=text.cache), 256)
    assert source == ByteFiles.of(tmp_path, [tmp_path / "text"])


def test_a_packed_enwik8_of_another_size_is_prepared_with_a_warning(tmp_path, capsys):
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(CONTENT))
    config = DataConfig("enwik8", path=str(tmp_path), cache=str(tmp_path / "cache"))
    corpus = prepare(config)
    assert corpus.folder.name.startswith("enwik8-")
    assert corpus.split("train").tokens.tobytes() == CONTENT[:756]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "has 840 bytes instead of the 100,000,000 of enwik8" in warning


def test_books_are_prepared_with_a_vocabulary_of_their_own(tmp_path):
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
    assert tokenizer.decode(split.tokens[: split.starts[1]]) == CONTENT
    assert tokenizer.decode(split.tokens[split.starts[1] :]) == CONTENT[:300]
    given = DataConfig(
        "pg19", config.path, tokenizer=str(corpus.folder / "tokenizer.model"), cache=config.cache
    )
    assert isinstance(find_source(given, 290), Books)
    assert prepare(given, 290).split("test").tokens.tolist() == split.tokens.tolist()


def test_imagenet64_is_prepared_image_by_image(tmp_path, capsys):
    rows = np.random.default_rng(0).integers(0, 256, (22, 12288), dtype=np.uint8)
    np.savez(tmp_path / "train_data_batch_1.npz", data=rows[:20])
    np.savez(tmp_path / "val_data.npz", data=rows[20:])
    config = DataConfig("imagenet64", path=str(tmp_path), cache=str(tmp_path / "cache"))
    assert isinstance(find_source(config, 256), ImageNet64)
    corpus = prepare(config)
    assert [size.documents for size in corpus.sizes.values()] == [19, 1, 2]
    assert corpus.sizes["test"] == SplitSize(2 * 12288, 2, 2 * 12288, None)
    split = corpus.split("test")
    assert split.starts.tolist() == [0, 12288]
    assert split.tokens[:3].tolist() == rows[20, [0, 4096, 8192]].tolist()
    assert "figures cannot be compared" in capsys.readouterr().err


def test_images_are_prepared_without_anything_left_beside_them(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.new("RGB", (64, 64), (i, 2 * i, 3 * i)).save(tmp_path / "images" / f"{i}.png")
    config = DataConfig("images", path=str(tmp_path / "images"), cache=str(tmp_path / "cache"))
    assert isinstance(find_source(config, 256), ImageFolder)
    corpus = prepare(config)
    assert [size.documents for size in corpus.sizes.values()] == [2, 1, 1]
    pixels = np.concatenate([corpus.split(name).tokens for name in SPLITS]).reshape(4, 4096, 3)
    order = pixels[:, 0, 0].argsort()
    assert (pixels[order] == np.arange(4)[:, None, None] * np.array([1, 2, 3])).all()
    assert os.listdir(tmp_path / "cache") == [corpus.folder.name]


@pytest.mark.parametrize("dataset", ["pg19", "imagenet64", "images"])
def test_what_is_not_downloaded_needs_a_path(tmp_path, dataset):
    assert refusal(DataConfig(dataset, cache=str(tmp_path))) == (
        f"{dataset} is not downloaded here; give its folder as --data.path"
    )


def test_enwik8_without_a_path_must_have_been_downloaded(tmp_path):
    assert "run `tvq prepare enwik8`" in refusal(DataConfig("enwik8", cache=str(tmp_path)))
