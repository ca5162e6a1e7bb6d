"""Training of a vocabulary: reproducible, interruptible, with errors that name the fix."""

import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from data_helpers import cut_text, is_lossless, rejection, story
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data import tokenizer_training as module
from transformer_vq.data.bpe_trainer import frame, read_frames
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.tokenizer_training import learn_tokenizer, train_bpe, train_sentencepiece
from transformer_vq.data.tokenizers import SentencePieceTokenizer, load_tokenizer
from transformer_vq.errors import MissingExtraError

VOCAB_SIZE = 400
BPE_SIZE = 330


def test_the_same_text_gives_the_same_file(tmp_path):
    train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    train_sentencepiece(iter([story()]), VOCAB_SIZE, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == (tmp_path / "books.model").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"again.model", "books.model"}


def test_training_without_sentencepiece_names_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match="pip install sentencepiece"):
        train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")


def test_a_vocabulary_that_is_too_large_reports_the_largest_size(tmp_path):
    text = story(20)
    message = rejection(train_sentencepiece, [text], 5000, tmp_path / "books.model")
    assert "set --model.vocab-size to at most" in message
    assert list(tmp_path.iterdir()) == []
    largest = int(message.split()[-1])
    train_sentencepiece([text], largest, tmp_path / "books.model")
    assert SentencePieceTokenizer(tmp_path / "books.model").vocab_size == largest


def test_a_vocabulary_that_is_too_small_reports_the_smallest_size(tmp_path):
    message = rejection(train_sentencepiece, [story()], 100, tmp_path / "books.model")
    assert "set --model.vocab-size to at least" in message
    smallest = int(message.split()[-1])
    train_sentencepiece([story()], smallest, tmp_path / "books.model")


def test_empty_texts_are_rejected(tmp_path):
    with pytest.raises(DataError, match="the texts are empty"):
        train_sentencepiece(["", "\n\n"], VOCAB_SIZE, tmp_path / "books.model")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit('out of luck')", "out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_a_failing_subprocess_is_reported(monkeypatch, tmp_path, program, message):
    monkeypatch.setattr(module, "_TRAINER", program)
    with pytest.raises(DataError, match=message):
        train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_process_and_no_files(monkeypatch, tmp_path):
    seen = []

    def interrupt(log, vocab_size):
        seen.append(int(next(iter(log))))
        raise KeyboardInterrupt

    program = "import os, time; os.write(2, b'%d\\n' % os.getpid()); time.sleep(60)"
    monkeypatch.setattr(module, "_TRAINER", program)
    monkeypatch.setattr(module, "_follow_log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_all_pieces(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr(module, "progress_bar", lambda *args: nullcontext(steps.append))
    train_sentencepiece([story()], VOCAB_SIZE, tmp_path / "books.model")
    assert all(step > 0 for step in steps)
    assert VOCAB_SIZE - 20 <= sum(steps) <= VOCAB_SIZE


@given(st.text(alphabet="ab \n"), st.floats(0, 1))
def test_sampled_lines_never_exceed_their_share(text, share):
    lines = list(module._sample_lines(text, share))
    assert sum(map(len, lines)) <= share * len(text)
    assert share < 1 or "".join(lines) == text


def test_text_beyond_the_limit_is_sampled_evenly(monkeypatch, tmp_path):
    texts = [f"{letter * 9}\n" * 100 for letter in "abcd"]
    n_chars = sum(map(len, texts))

    def keep_text(folder, vocab_size):
        Path(folder, "text").rename(Path(folder, "learned.model"))

    monkeypatch.setattr(module, "MAX_CHARS", n_chars // 4)
    monkeypatch.setattr(module, "_run_trainer", keep_text)
    train_sentencepiece(texts, VOCAB_SIZE, tmp_path / "text", n_chars)
    lines = (tmp_path / "text").read_text().split("\n")
    assert [lines.count(letter * 9) for letter in "abcd"] == [25] * 4


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Return a folder with a learned byte-level BPE vocabulary."""
    folder = tmp_path_factory.mktemp("bpe")
    learn_tokenizer("bpe", [story()], BPE_SIZE, folder)
    return folder


def test_learned_bpe_has_the_requested_size_and_one_special_token(bpe):
    tokenizer = load_tokenizer(bpe, end_of_document=True)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (BPE_SIZE, 0, 0)
    assert load_tokenizer(bpe).eod is None
    assert cut_text(tokenizer, "a b\nc\r\nd") == ["a", " b\n", "c\r\n", "d"]
    assert len(tokenizer.encode(story())) < len(story()) / 3
    assert 0 not in tokenizer.encode("<|endoftext|>")
    names = {path.name for path in bpe.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}


def test_learned_bpe_does_not_depend_on_threads_and_parts(bpe, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    train_bpe(iter(story().splitlines(keepends=True)), BPE_SIZE, tmp_path)
    expected = (bpe / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == expected


@given(st.text() | st.text(alphabet="a1 \n\r\t\u2581'!\u00e9\U0001f600\0<|endoftext>"))
def test_learned_bpe_is_lossless_and_can_be_cut_at_lines(bpe, text):
    tokenizer = TOKENIZERS.setdefault(bpe, load_tokenizer(bpe))
    assert is_lossless(tokenizer, text)
    whole = tokenizer.encode(f"{text}x\ny{text}")
    assert whole == tokenizer.encode(f"{text}x\n") + tokenizer.encode(f"y{text}")


TOKENIZERS = {}


def test_learned_bpe_splits_numbers_into_at_most_three_digits(tmp_path):
    train_bpe(["2024 2024 2024 2024\n" * 50], 259, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2024")] == [b"202", b"4"]


@pytest.mark.parametrize(("text", "size"), [(story(20), 5000), ("ab", 300)])
def test_bpe_that_is_too_large_reports_the_largest_size(tmp_path, text, size):
    message = rejection(train_bpe, [text], size, tmp_path)
    assert "set --model.vocab-size to at most" in message
    assert list(tmp_path.iterdir()) == []
    largest = int(message.split()[-1])
    train_bpe([text], largest, tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == largest


def test_bpe_that_is_too_small_reports_the_smallest_size(tmp_path):
    message = rejection(train_bpe, [story()], 256, tmp_path)
    assert message.endswith("set --model.vocab-size to at least 257")
    train_bpe([story()], 257, tmp_path)
    assert is_lossless(load_tokenizer(tmp_path), story())


def test_bpe_of_empty_texts_is_rejected(tmp_path):
    assert "the texts are empty" in rejection(train_bpe, ["", ""], BPE_SIZE, tmp_path)


def test_bpe_without_the_library_names_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match="pip install tokenizers"):
        learn_tokenizer("bpe", [story()], BPE_SIZE, tmp_path)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('out of luck')", "out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_a_failing_bpe_subprocess_is_reported(monkeypatch, tmp_path, program, message):
    monkeypatch.setattr(module, "_BPE_COMMAND", ("-c", program))
    assert message in rejection(train_bpe, [story()] * 99, BPE_SIZE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_of_bpe_leaves_no_process_and_no_files(monkeypatch, tmp_path):
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(module, "_BPE_COMMAND", ("-c", program))
    pids = []

    def texts():
        while not any(path.read_text() for path in tmp_path.glob(".*/pid")):
            yield ""
        pids.extend(int(path.read_text()) for path in tmp_path.glob(".*/pid"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_bpe(texts(), BPE_SIZE, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert list(tmp_path.iterdir()) == []


def test_bpe_progress_counts_characters_and_shows_the_merges(monkeypatch, tmp_path):
    calls = []

    def advance(n, note=""):
        calls.append((n, note))

    monkeypatch.setattr(module, "progress_bar", lambda *args: nullcontext(advance))
    train_bpe([story(), "x"], BPE_SIZE, tmp_path)
    assert calls == [(len(story()), ""), (1, ""), (0, "merging")]


def test_bpe_text_beyond_the_limit_is_sampled(monkeypatch, tmp_path):
    texts, sent = [f"{letter * 9}\n" * 100 for letter in "abcd"], []
    monkeypatch.setattr(module, "MAX_BPE_CHARS", 1000)
    monkeypatch.setattr(module.bpe_trainer, "frame", lambda text: sent.append(text) or b"")
    rejection(train_bpe, texts, BPE_SIZE, tmp_path, 4000)
    assert [text.count(b"\n") for text in sent] == [25] * 4


@given(st.lists(st.text(), max_size=5))
def test_frames_are_read_as_they_were_written(texts):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    file = io.BytesIO(b"".join(frame(text.encode()) for text in texts))
    assert list(read_frames(file)) == texts


@given(st.text(alphabet="ab\n", max_size=50))
def test_chunks_are_short_and_end_with_lines_if_possible(text):
    limit = 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_CHARS", limit)
        chunks = list(module._chunks(text))
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= limit for chunk in chunks)
    assert all(chunk.endswith("\n") for chunk in chunks[:-1] if "\n" in chunk)
