"""Training of a vocabulary: reproducible, interruptible, with errors that name the fix."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from data_helpers import rejection, story
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data import tokenizer_training as module
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.tokenizer_training import train_sentencepiece
from transformer_vq.data.tokenizers import SentencePieceTokenizer
from transformer_vq.errors import MissingExtraError

VOCAB_SIZE = 400


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
