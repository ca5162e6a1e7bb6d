"""Learns a byte-level BPE vocabulary from text, with the `tokenizers` library in a subprocess.

The vocabulary is lossless: text without a matching token is encoded as bytes. The library ignores
Ctrl-C, so this file is also the program of a subprocess.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from transformer_vq.data.paths import DataError
from transformer_vq.data.tokenizers import JSON_FILE, HFTokenizer, utf8
from transformer_vq.errors import import_extra
from transformer_vq.files import PARTIAL

END_OF_TEXT = "<|endoftext|>"
N_SYMBOLS = 257  # END_OF_TEXT and the bytes
LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")
"""Where text may be divided, because tokens do not span lines."""
_TEXTS = "texts.jsonl"

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
    import_extra("tokenizers", "a BPE tokenizer")
    if vocab_size < N_SYMBOLS:
        raise _error(vocab_size, f"set --model.vocab-size to at least {N_SYMBOLS}")
    # The working directory differs, so relative entries of sys.path would not work.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", folder) as partial:
        with open(f"{partial}/{_TEXTS}", "w") as file:
            for text in texts:
                file.write(json.dumps(utf8(text).decode(errors="replace")) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "transformer_vq.data.bpe", str(vocab_size)],
            cwd=partial,
            env=os.environ | {"PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it may be out of memory"]
            raise _error(vocab_size, f"{lines[-1]} (exit status {done.returncode})")
        learned = HFTokenizer(Path(partial, JSON_FILE))
    if learned.vocab_size < vocab_size:
        fix = f"set --model.vocab-size to at most {learned.vocab_size}"
        raise _error(vocab_size, f"there is too little text; {fix}")
    learned.save(folder)


def _error(vocab_size: int, reason: str) -> DataError:
    return DataError(f"cannot learn a vocabulary of {vocab_size:,} tokens: {reason}")


def _train(vocab_size: int) -> None:
    """Learn from the texts in the working directory and write a tokenizer.json."""
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
    with open(_TEXTS) as file:
        tokenizer.train_from_iterator(map(json.loads, file), trainer)
    tokenizer.save(JSON_FILE)


if __name__ == "__main__":
    _train(int(sys.argv[1]))
