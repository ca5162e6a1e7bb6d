"""Training of vocabularies from text by byte pair encoding.

The vocabularies are lossless: text without a matching token is encoded as bytes. The libraries
ignore Ctrl-C, so they run in a subprocess.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from transformer_vq.data import bpe_trainer
from transformer_vq.data.hf_tokenizer import HFTokenizer, import_tokenizers
from transformer_vq.data.sentencepiece_tokenizer import import_sentencepiece
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.tokenizer_files import JSON_FILE, MODEL_FILE, utf8
from transformer_vq.files import PARTIAL
from transformer_vq.progress import progress_bar

MAX_CHARS = 1_000_000_000  # characters to train on, as many as the paper's authors used
MAX_BPE_CHARS = 250_000_000  # bounds the memory, also for languages without spaces
LEARNED_BOS = {"bpe": 0, "sentencepiece": 1}

_N_SYMBOLS = 2 + 1 + 256  # unk and bos, the line end, the bytes
_OPTIONS: dict[str, Any] = {
    "input": "text",
    "model_prefix": "learned",
    "model_type": "bpe",
    "unk_id": 0,
    "bos_id": LEARNED_BOS["sentencepiece"],
    "eos_id": -1,
    "user_defined_symbols": ["\n"],
    "byte_fallback": True,
    "character_coverage": 0.9999,  # rarer characters are encoded as bytes
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "max_sentence_length": 1 << 30,  # longer lines would be skipped
    "num_threads": 16,  # recorded in the model file, so it must not depend on the machine
}
_TRAINER = "sentencepiece.SentencePieceTrainer.train(**json.loads(sys.argv[1]))"
_BPE_COMMAND = ("-m", bpe_trainer.__name__)
_CHUNK_CHARS = 1 << 16  # the library buffers hundreds of texts


def learn_tokenizer(
    name: Literal["bpe", "sentencepiece"],
    texts: Iterable[str],
    vocab_size: int,
    folder: Path,
    n_chars: int = 0,
) -> None:
    """Learn a vocabulary from texts and write it to a folder, for `load_tokenizer`.

    n_chars: an upper bound for the total length of the texts, for progress and sampling.
    """
    if name == "bpe":
        train_bpe(texts, vocab_size, folder, n_chars)
    else:
        train_sentencepiece(texts, vocab_size, folder / MODEL_FILE, n_chars)


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, n_chars: int = 0) -> None:
    """Train a byte-level BPE vocabulary; the same texts always give the same file.

    Token 0 is <|endoftext|>. Above MAX_BPE_CHARS, an even sample of the lines is used.
    """
    import_tokenizers()
    if vocab_size < bpe_trainer.N_SYMBOLS:
        raise _error(
            vocab_size, f"set --model.vocab-size to at least {bpe_trainer.N_SYMBOLS}", "tokens"
        )
    share = min(1.0, MAX_BPE_CHARS / max(n_chars, 1))
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", folder) as partial:
        _run_bpe_trainer(texts, vocab_size, partial, n_chars, share)
        learned = HFTokenizer(Path(partial, JSON_FILE))
        if learned.vocab_size == bpe_trainer.N_SYMBOLS < vocab_size:
            raise _error(vocab_size, "the texts are empty; give another --data.path", "tokens")
        if learned.vocab_size < vocab_size:
            raise _error(
                vocab_size,
                f"there is too little text; set --model.vocab-size to at most {learned.vocab_size}",
                "tokens",
            )
        learned.save(folder)


def _run_bpe_trainer(
    texts: Iterable[str], vocab_size: int, folder: str, n_chars: int, share: float
) -> None:
    """Send the texts to a subprocess, which writes a tokenizer.json in this folder."""
    command = [sys.executable, *_BPE_COMMAND, str(vocab_size), JSON_FILE]
    # The working directory differs, so relative entries of sys.path would not work.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with (
        open(f"{folder}/log", "w+", errors="replace") as log,
        progress_bar("learning the vocabulary", n_chars or None, "characters") as advance,
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stderr=log,
        ) as child,
    ):
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):  # reported below, with the reason in the log
                for text in texts:
                    sample = text if share == 1 else "".join(_sample_lines(text, share))
                    for chunk in _chunks(sample):
                        child.stdin.write(bpe_trainer.frame(utf8(chunk)))
                    advance(len(text))
                child.stdin.close()
            advance(0, note="merging")
            child.wait()
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        lines = log.read().split("\n")
    if child.returncode != 0:
        reason = next((line for line in reversed(lines) if line.strip()), "no reason was given")
        if child.returncode < 0:
            reason = f"signal {-child.returncode} ended the subprocess; it may be out of memory"
        raise _error(vocab_size, reason, "tokens")


def _chunks(text: str) -> Iterator[str]:
    """Cut a text into parts of limited length, at line ends if possible."""
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, model_path: Path, n_chars: int = 0
) -> None:
    """Train a vocabulary and write it to `model_path`; the same texts always give the same file.

    n_chars: an upper bound for the total length of the texts. Above MAX_CHARS, an even sample of
    the lines is used.
    """
    import_sentencepiece()
    share = min(1.0, MAX_CHARS / max(n_chars, 1))
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", model_path.parent) as folder:
        with open(f"{folder}/text", "w", encoding="utf-8", newline="\n") as file:
            for text in texts:
                file.writelines(_sample_lines(text, share))
                file.write("\n")
        _run_trainer(folder, vocab_size)
        os.replace(f"{folder}/learned.model", model_path)


def _sample_lines(text: str, share: float) -> Iterator[str]:
    """Yield evenly spaced lines that make up at most this share of a text."""
    seen = taken = 0
    for line in StringIO(text, newline="\n"):
        seen += len(line)
        if taken + len(line) <= share * seen:
            taken += len(line)
            yield line


def _run_trainer(folder: str, vocab_size: int) -> None:
    """Train `learned.model` on the file `text`, both in this folder."""
    options = json.dumps(_OPTIONS | {"vocab_size": vocab_size})
    command = [sys.executable, "-c", f"import json, sys, sentencepiece; {_TRAINER}", options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stderr=pipe, text=True, errors="replace") as child:
        assert child.stderr is not None
        try:
            last_line = _follow_log(child.stderr, vocab_size)
            child.wait()
        finally:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise _training_error(last_line, child.returncode, vocab_size)


def _follow_log(log: Iterable[str], vocab_size: int) -> str:
    """Report the number of pieces in SentencePiece's log as progress; return the last line."""
    line, n_merged = "", 0
    with progress_bar("learning the vocabulary", vocab_size, "pieces") as advance:
        for line in log:
            if found := re.search(r"Alphabet size=(\d+)", line):
                advance(_N_SYMBOLS + int(found[1]))
            elif found := re.search(r"Added: freq=\d+ size=(\d+)", line):
                advance(int(found[1]) - n_merged)
                n_merged = int(found[1])
    return line.strip()


def _training_error(last_line: str, code: int, vocab_size: int) -> DataError:
    reason = last_line or "SentencePiece gave no reason"
    if found := re.search(r"Vocabulary size too high .* <= (\d+)", last_line):
        reason = f"there is too little text; set --model.vocab-size to at most {found[1]}"
    elif found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", last_line):
        reason = f"bytes and characters need more; set --model.vocab-size to at least {found[1]}"
    elif "sentences_.empty()" in last_line:
        reason = "the texts are empty; give another --data.path"
    elif code < 0:
        reason = f"signal {-code} ended SentencePiece; it may be out of memory"
    return _error(vocab_size, reason, "pieces")


def _error(vocab_size: int, reason: str, unit: str) -> DataError:
    return DataError(f"cannot learn a vocabulary of {vocab_size:,} {unit}: {reason}")
