"""Learns a byte-level BPE vocabulary from text, with the `tokenizers` library.

The vocabulary is lossless: text without a matching token is encoded as bytes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from transformer_vq.data.hf_tokenizer import HFTokenizer, import_tokenizers
from transformer_vq.data.paths import DataError
from transformer_vq.data.tokenizers import JSON_FILE, utf8
from transformer_vq.files import PARTIAL

END_OF_TEXT = "<|endoftext|>"
N_SYMBOLS = 257  # END_OF_TEXT and the bytes
LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")
"""Where text may be divided, because tokens do not span lines."""

# Words with one character before them, up to three digits, punctuation with the line ends after
# it, and white space. A line end is never followed by anything else, so lines are independent.
# Possessive quantifiers (++) keep the time linear in the length of a match.
_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learn_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Write a vocabulary to a folder, for `load_tokenizer`.

    Token 0 is <|endoftext|>. The result does not depend on the order of the texts, on where they
    are divided at LINE_STARTS, or on the number of threads.
    """
    library = import_tokenizers()
    if vocab_size < N_SYMBOLS:
        raise _error(vocab_size, f"set --model.vocab-size to at least {N_SYMBOLS}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Split(library.Regex(_PATTERN), "isolated"),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(tokenizer, trainer, texts)
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", folder) as partial:
        tokenizer.save(f"{partial}/{JSON_FILE}")
        learned = HFTokenizer(Path(partial, JSON_FILE))
    if learned.vocab_size < vocab_size:
        raise _error(
            vocab_size,
            f"there is too little text; set --model.vocab-size to at most {learned.vocab_size}",
        )
    learned.save(folder)


def _train(tokenizer: Any, trainer: Any, texts: Iterable[str]) -> None:
    """Train in a thread, because the library ignores Ctrl-C; an interrupt abandons the thread."""
    stopped, failures = Event(), list[BaseException]()

    def valid_texts() -> Iterator[str]:
        for text in texts:
            if stopped.is_set():
                raise InterruptedError
            yield utf8(text).decode(errors="replace")

    def run() -> None:
        try:
            tokenizer.train_from_iterator(valid_texts(), trainer)
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stopped.set()
        thread.join(1)  # while texts are read, the thread ends at once
        raise
    if failures:
        raise failures[0]


def _error(vocab_size: int, reason: str) -> DataError:
    return DataError(f"cannot learn a vocabulary of {vocab_size:,} tokens: {reason}")
