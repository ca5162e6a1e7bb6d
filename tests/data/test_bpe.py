"""Learning of a BPE vocabulary: reproducible, interruptible, with errors that name the fix."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from data_helpers import cut_text, is_lossless, rejection, story
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.data.bpe import learn_bpe
from transformer_vq.data.tokenizers import load_tokenizer

SIZE = 330
TOKENIZERS = {}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Return a folder with a learned byte-level BPE vocabulary."""
    folder = tmp_path_factory.mktemp("bpe")
    learn_bpe([story()], SIZE, folder)
    return folder


def test_a_learned_vocabulary_has_the_requested_size_and_one_special_token(bpe):
    tokenizer = load_tokenizer(bpe, end_of_document=True)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (SIZE, 0, 0)
    assert load_tokenizer(bpe).eod is None
    assert cut_text(tokenizer, "a b\nc\r\nd") == ["a b\n", "c\r\nd"]
    assert len(tokenizer.encode(story())) < len(story()) / 3
    assert 0 not in tokenizer.encode("<|endoftext|>")
    names = {path.name for path in bpe.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}


def test_a_learned_vocabulary_does_not_depend_on_threads_and_parts(bpe, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    learn_bpe(iter(story().splitlines(keepends=True)), SIZE, tmp_path)
    expected = (bpe / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == expected


@given(st.text() | st.text(alphabet="a1 \n\r\t\u2581'!\u00e9\U0001f600\0<|endoftext>"))
def test_a_learned_vocabulary_is_lossless_and_can_be_cut_at_lines(bpe, text):
    tokenizer = TOKENIZERS.setdefault(bpe, load_tokenizer(bpe))
    assert is_lossless(tokenizer, text)
    whole = tokenizer.encode(f"{text}x\ny{text}")
    assert whole == tokenizer.encode(f"{text}x\n") + tokenizer.encode(f"y{text}")


@pytest.mark.parametrize(("text", "size"), [(story(20), 5000), ("ab", 300)])
def test_a_vocabulary_that_is_too_large_reports_the_largest_size(tmp_path, text, size):
    message = rejection(learn_bpe, [text], size, tmp_path)
    assert "set --model.vocab-size to at most" in message
    assert list(tmp_path.iterdir()) == []
    largest = int(message.split()[-1])
    learn_bpe([text], largest, tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == largest


def test_an_interrupt_leaves_no_process_and_no_files(tmp_path):
    program = f"""
from pathlib import Path
from transformer_vq.data.bpe import learn_bpe
text = " ".join(str(1 / i) for i in range(1, 300_000))
learn_bpe([text], 60_000, Path({str(tmp_path)!r}))
"""
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    while not learning_processes(tmp_path):
        assert child.poll() is None
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in child.communicate(timeout=60)[1]
    assert not learning_processes(tmp_path)
    assert os.listdir(tmp_path) == []


def learning_processes(folder):
    """Return the processes that work in a folder below the given one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found += [entry] if folder in entry.readlink().parents else []
    return found
