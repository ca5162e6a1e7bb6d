"""Text as tokens and back: bytes as they are, or the pieces of a SentencePiece vocabulary.

A vocabulary learned here loses nothing: what it has no piece for is spelled in bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from transformer_vq.data.sources.base import DataError, kind_of, reason
from transformer_vq.errors import missing_extra
from transformer_vq.files import PARTIAL, atomic_write
from transformer_vq.progress import progress_bar

MODEL_FILE = "tokenizer.model"
MAX_CHARS = 1_000_000_000  # to learn a vocabulary from; as many as the paper's authors took
LEARNED_BOS = 1

_SPACE = "\u2581"  # stands for a space within pieces
_SPELLED = re.compile(f"([{_SPACE}\udc80-\udcff]+)")
_N_SYMBOLS = 2 + 1 + 256  # unk and bos, the line end, the bytes
_OPTIONS: dict[str, Any] = {
    "input": "text",
    "model_prefix": "learned",
    "model_type": "bpe",
    "unk_id": 0,
    "bos_id": LEARNED_BOS,
    "eos_id": -1,
    "user_defined_symbols": ["\n"],
    "byte_fallback": True,
    "character_coverage": 0.9999,  # rarer characters are spelled in bytes
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "max_sentence_length": 1 << 30,  # longer lines would be left out
    "num_threads": 16,  # stands in the model, so it must not depend on the machine
}
_TRAINER = "sentencepiece.SentencePieceTrainer.train(**json.loads(sys.argv[1]))"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    vocab_size: int
    bos: int

    @property
    def sha256(self) -> str | None:
        """Identifies a learned vocabulary; None for bytes, which are always the same."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without bos."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Text in UTF-8; it may begin or end within a character, which several tokens can share."""

    def save(self, folder: Path) -> None:
        """Put into a folder what `load_tokenizer` needs."""


class ByteTokenizer:
    """The bytes of UTF-8; those that were none where a text came from (surrogate escapes) too."""

    vocab_size = 256
    bos = 0
    sha256 = None

    @property
    def pieces(self) -> list[str]:
        """A name for every token."""
        return [f"<0x{byte:02X}>" for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(int(token) for token in tokens)

    def save(self, folder: Path) -> None:
        """Bytes need no file."""


class SentencePieceTokenizer:
    """The pieces of a SentencePiece model.

    Decoding is exact for vocabularies learned here; others may alter a text, by putting a space
    before it for instance. sha256: that of the file, if it is known; any other raises DataError.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        self._model = _sentencepiece().SentencePieceProcessor()
        self._file = _read(path)
        if sha256 not in (None, self.sha256):
            raise DataError(f"{path} is corrupt or another vocabulary: its SHA-256 does not match")
        try:
            self._model.LoadFromSerializedProto(self._file)
            self.vocab_size = int(self._model.get_piece_size())
            self.bos = int(self._model.bos_id())
            self._texts = [_text_of(self._model, token) for token in range(self.vocab_size)]
            self._byte_tokens = _byte_tokens(self._model)
            self._by_line = _lines_stand_alone(self._model)
        except Exception as error:  # corrupt files make SentencePiece raise errors of many kinds
            why = "is not a SentencePiece model, or it is corrupt"
            raise DataError(f"{path} {why}; copy it again") from error
        if self.bos < 0:
            raise DataError(f"{path} has no bos piece; train it with one (its option bos_id)")

    @property
    def sha256(self) -> str:
        """Of the model's file."""
        return hashlib.sha256(self._file).hexdigest()

    @property
    def pieces(self) -> list[str]:
        """A name for every token: SentencePiece's own."""
        return [self._model.id_to_piece(token) for token in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """SentencePiece's own ids; its sign for a space and surrogate escapes go in bytes."""
        parts = _SPELLED.split(text) if self._byte_tokens and not text.isascii() else [text]
        tokens: list[int] = []
        for i, part in enumerate(parts):
            tokens += [self._byte_tokens[b] for b in _utf8(part)] if i % 2 else self._encode(part)
        return tokens

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._texts[int(token)] for token in tokens)

    def save(self, folder: Path) -> None:
        with atomic_write(folder / MODEL_FILE) as partial:
            partial.write_bytes(self._file)

    def _encode(self, text: str) -> list[int]:
        # A book as a whole takes three times as long as its lines.
        parts = StringIO(text, newline="\n").readlines() if self._by_line else [text]
        return list(chain.from_iterable(self._model.encode(parts, num_threads=1)))


def load_tokenizer(folder: Path, sha256: str | None = None) -> Tokenizer:
    """The tokenizer that was saved in a folder; bytes, if there is none.

    sha256: of the tokenizer that was saved, if it is known; any other raises DataError.
    """
    path = folder / MODEL_FILE
    if sha256 is None and not os.path.lexists(path):
        return ByteTokenizer()
    return SentencePieceTokenizer(path, sha256)


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, model_path: Path, n_chars: int = 0
) -> None:
    """Learn a vocabulary by byte pair encoding; the same texts always give the same file.

    n_chars: the length of all texts together, or more; if it is above MAX_CHARS, lines are taken
    evenly from all texts. SentencePiece heeds no Ctrl-C, so it works in a process of its own.
    """
    _sentencepiece()
    share = min(1.0, MAX_CHARS / max(n_chars, 1))
    with tempfile.TemporaryDirectory(PARTIAL, ".vocabulary-", model_path.parent) as folder:
        with open(f"{folder}/text", "w", encoding="utf-8", newline="\n") as file:
            for text in texts:
                file.writelines(_some_lines(text, share))
                file.write("\n")
        _learn(folder, vocab_size)
        os.replace(f"{folder}/learned.model", model_path)


def _some_lines(text: str, share: float) -> Iterator[str]:
    """Lines from all over a text that make up this share of it, never more."""
    seen = taken = 0
    for line in StringIO(text, newline="\n"):
        seen += len(line)
        if taken + len(line) <= share * seen:
            taken += len(line)
            yield line


def _learn(folder: str, vocab_size: int) -> None:
    """Make learned.model from text, both in this folder."""
    options = json.dumps(_OPTIONS | {"vocab_size": vocab_size})
    command = [sys.executable, "-c", f"import json, sys, sentencepiece; {_TRAINER}", options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stderr=pipe, text=True, errors="replace") as child:
        assert child.stderr is not None
        try:
            last_line = _follow(child.stderr, vocab_size)
            child.wait()
        finally:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise _failure(last_line, child.returncode, vocab_size)


def _follow(log: Iterable[str], vocab_size: int) -> str:
    """Show how many pieces there are, as SentencePiece logs them; returns the last line."""
    line, n_merged = "", 0
    with progress_bar("learning the vocabulary", vocab_size, "pieces") as advance:
        for line in log:
            if found := re.search(r"Alphabet size=(\d+)", line):
                advance(_N_SYMBOLS + int(found[1]))
            elif found := re.search(r"Added: freq=\d+ size=(\d+)", line):
                advance(int(found[1]) - n_merged)
                n_merged = int(found[1])
    return line.strip()


def _failure(last_line: str, code: int, vocab_size: int) -> DataError:
    reason = last_line or "SentencePiece did not say why"
    if found := re.search(r"Vocabulary size too high .* <= (\d+)", last_line):
        reason = f"there is too little text; set --model.vocab-size to at most {found[1]}"
    elif found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", last_line):
        reason = f"bytes and characters need more; set --model.vocab-size to at least {found[1]}"
    elif "sentences_.empty()" in last_line:
        reason = "there is no text"
    elif code < 0:
        reason = f"signal {-code} ended SentencePiece; is there enough memory?"
    return DataError(f"cannot learn a vocabulary of {vocab_size:,} pieces: {reason}")


def _sentencepiece() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # some versions cause them
            import sentencepiece
    except ImportError:
        feature = "a SentencePiece vocabulary"
        raise missing_extra(feature, "sentencepiece", "text") from None
    return sentencepiece


def _read(path: Path) -> bytes:
    if kind_of(path, "give a SentencePiece .model file") != "file":
        raise DataError(f"{path} is a folder; give a SentencePiece .model file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the vocabulary {path}: {reason(error)}") from error


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text_of(model: Any, token: int) -> bytes:
    if model.is_control(token):
        return b""
    piece: str = "\ufffd" if model.is_unknown(token) else model.id_to_piece(token)
    text = piece.replace(_SPACE, " ").encode()
    return bytes.fromhex(piece[3:5]) if model.is_byte(token) else text


def _byte_tokens(model: Any) -> list[int]:
    """The tokens of all bytes; empty if the model has none."""
    tokens = [model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return tokens if all(map(model.is_byte, tokens)) else []


def _lines_stand_alone(model: Any) -> bool:
    """Whether lines have the same tokens each by itself as within a text."""
    end = model.piece_to_id("\n")
    apart = [end, end, *model.encode("a\n"), *model.encode(" b")]
    return end != model.unk_id() and model.encode("\n\na\n b") == apart
