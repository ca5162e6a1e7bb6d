"""Learns a byte-level BPE vocabulary from standard input; a program for a subprocess.

It imports only the standard library and `tokenizers`, so it starts quickly and needs little memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import BinaryIO

END_OF_TEXT = "<|endoftext|>"
N_SYMBOLS = 257  # END_OF_TEXT and the bytes

# Words with one character before them, up to three digits, punctuation with the line ends after
# it, and white space. A line end is never followed by anything else, so lines are independent.
# Possessive quantifiers (++) keep the time linear in the length of a match.
_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def frame(text: bytes) -> bytes:
    """Return one text as it is sent to standard input."""
    return len(text).to_bytes(4, "little") + text


def read_frames(file: BinaryIO) -> Iterator[str]:
    """Yield the texts of a file written with `frame`."""
    while size := file.read(4):
        yield file.read(int.from_bytes(size, "little")).decode(errors="replace")


def learn(texts: Iterator[str], vocab_size: int, path: str) -> None:
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
    learn(read_frames(sys.stdin.buffer), int(sys.argv[1]), sys.argv[2])
