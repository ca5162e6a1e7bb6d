"""Learns a byte-level BPE vocabulary from text, with the `tokenizers` library in a subprocess.

The vocabulary is lossless: text without a matching token is encoded as bytes. The library ignores
Ctrl-C, so this file is also the program of a subprocess, which reads texts from standard input.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from transformer_vq.data.hf_tokenizer import HFTokenizer, import_tokenizers
from transformer_vq.data.paths import DataError
from transformer_vq.data.tokenizers import JSON_FILE, utf8
from transformer_vq.files import PARTIAL

MAX_CHARS = 250_000_000  # bounds the memory, also for languages without spaces
END_OF_TEXT = "<|endoftext|>"
N_SYMBOLS = 257  # END_OF_TEXT and the bytes
LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")
"""Where text may be divided, because tokens do not span lines."""
_CHUNK_CHARS = 1 << 16  # the library buffers hundreds of texts

# Words with one character before them, up to three digits, punctuation with the line ends after
# it, and white space. A line end is never followed by anything else, so lines are independent.
# Possessive quantifiers (++) keep the time linear in the length of a match.
_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learn_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Write a vocabulary to a folder, for `load_tokenizer`; the same texts give the same file.

    Token 0 is <|endoftext|>.
    """
    import_tokenizers()
    if vocab_size < N_SYMBOLS:
        raise _error(vocab_size, f"set --model.vocab-size to at least {N_SYMBOLS}")
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", folder) as partial:
        _run(texts, vocab_size, partial)
        learned = HFTokenizer(Path(partial, JSON_FILE))
        if learned.vocab_size < vocab_size:
            raise _error(
                vocab_size,
                f"there is too little text; set --model.vocab-size to at most {learned.vocab_size}",
            )
        learned.save(folder)


def _run(texts: Iterable[str], vocab_size: int, folder: str) -> None:
    """Send the texts to a subprocess, which writes a tokenizer.json in this folder."""
    command = [sys.executable, "-m", "transformer_vq.data.bpe", str(vocab_size), JSON_FILE]
    # The working directory differs, so relative entries of sys.path would not work.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with (
        open(f"{folder}/log", "w+", errors="replace") as log,
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
                    for chunk in _chunks(text):
                        child.stdin.write(frame(utf8(chunk)))
                child.stdin.close()
            child.wait()
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
        log.seek(0)
        lines = log.read().split("\n")
    if child.returncode != 0:
        reason = next((line for line in reversed(lines) if line.strip()), "no reason was given")
        if child.returncode < 0:
            reason = f"signal {-child.returncode} ended the subprocess; it may be out of memory"
        raise _error(vocab_size, reason)


def _chunks(text: str) -> Iterator[str]:
    """Cut a text into parts of limited length, at line ends if possible."""
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _error(vocab_size: int, reason: str) -> DataError:
    return DataError(f"cannot learn a vocabulary of {vocab_size:,} tokens: {reason}")


def frame(text: bytes) -> bytes:
    """Return one text as it is sent to standard input."""
    return len(text).to_bytes(4, "little") + text


def read_frames(file: BinaryIO) -> Iterator[str]:
    """Yield the texts of a file written with `frame`."""
    while size := file.read(4):
        yield file.read(int.from_bytes(size, "little")).decode(errors="replace")


def _train(texts: Iterator[str], vocab_size: int, path: str) -> None:
    """Write a tokenizer.json; the result does not depend on the number of threads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(path)


if __name__ == "__main__":
    _train(read_frames(sys.stdin.buffer), int(sys.argv[1]), sys.argv[2])
