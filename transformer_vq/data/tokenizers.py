"""Tokenizers: bytes as they are, or the pieces of a SentencePiece vocabulary."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Sequence
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.paths import error_reason, path_kind
from transformer_vq.errors import missing_extra
from transformer_vq.files import atomic_write

MODEL_FILE = "tokenizer.model"

_SPACE = "\u2581"  # SentencePiece's replacement for a space inside pieces
_AS_BYTES = re.compile(f"([{_SPACE}\udc80-\udcff]+)")


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocab_size: int
    bos: int

    @property
    def sha256(self) -> str | None:
        """Identifies the vocabulary; None for bytes, which need no file."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without bos."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return UTF-8 text; it may start or end inside a character of several tokens."""

    def save(self, folder: Path) -> None:
        """Write to a folder what `load_tokenizer` needs."""


class ByteTokenizer:
    """One token per UTF-8 byte; a surrogate escape is encoded as its original byte."""

    vocab_size = 256
    bos = 0
    sha256 = None

    @property
    def pieces(self) -> list[str]:
        """The name of every token."""
        return [f"<0x{byte:02X}>" for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(int(token) for token in tokens)

    def save(self, folder: Path) -> None:
        """Do nothing: bytes need no file."""


class SentencePieceTokenizer:
    """The pieces of a SentencePiece model.

    Decoding is exact for vocabularies of `train_sentencepiece`. Other models may change a text, for
    example by adding a space before it.
    path: a .model file. sha256: of that file, if known; any other file raises DataError.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        self._model = import_sentencepiece().SentencePieceProcessor()
        self._file = _read(path)
        if sha256 not in (None, self.sha256):
            raise DataError(
                f"{path} is corrupt or another vocabulary: its SHA-256 does not match; restore it"
            )
        try:
            self._model.LoadFromSerializedProto(self._file)
            self.vocab_size = int(self._model.get_piece_size())
            self.bos = int(self._model.bos_id())
            self._texts = [_text_of(self._model, token) for token in range(self.vocab_size)]
            self._byte_tokens = _byte_tokens(self._model)
            self._by_line = _encodes_lines_independently(self._model)
        except Exception as error:  # SentencePiece raises many kinds of errors for corrupt files
            raise DataError(
                f"{path} is not a SentencePiece model or is corrupt; copy it again"
            ) from error
        if self.bos < 0:
            raise DataError(f"{path} has no bos piece; train it with the option bos_id")

    @property
    def sha256(self) -> str:
        """The SHA-256 of the model file."""
        return hashlib.sha256(self._file).hexdigest()

    @property
    def pieces(self) -> list[str]:
        """The name of every token, as in SentencePiece."""
        return [self._model.id_to_piece(token) for token in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Return SentencePiece's ids; its space symbol and surrogate escapes become bytes."""
        parts = _AS_BYTES.split(text) if self._byte_tokens and not text.isascii() else [text]
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
        # Encoding a book line by line takes a third of the time of encoding it at once.
        parts = StringIO(text, newline="\n").readlines() if self._by_line else [text]
        return list(chain.from_iterable(self._model.encode(parts, num_threads=1)))


def load_tokenizer(folder: Path, sha256: str | None = None) -> Tokenizer:
    """Load the tokenizer that was saved in a folder; a ByteTokenizer if there is no file.

    sha256: of the saved vocabulary, if known; a missing or different file raises DataError.
    """
    path = folder / MODEL_FILE
    if sha256 is None and not os.path.lexists(path):
        return ByteTokenizer()
    return SentencePieceTokenizer(path, sha256)


def import_sentencepiece() -> Any:
    """Import the optional package sentencepiece; raise MissingExtraError if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by some versions
            import sentencepiece
    except ImportError:
        raise missing_extra("a SentencePiece vocabulary", "sentencepiece") from None
    return sentencepiece


def _read(path: Path) -> bytes:
    fix = "give a SentencePiece .model file"
    if path_kind(path, fix) != "file":
        raise DataError(f"{path} is a folder; {fix}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the vocabulary {path}: {error_reason(error)}") from error


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text_of(model: Any, token: int) -> bytes:
    """Return the text of a token in UTF-8; empty for control tokens."""
    if model.is_control(token):
        return b""
    piece: str = "\ufffd" if model.is_unknown(token) else model.id_to_piece(token)
    text = piece.replace(_SPACE, " ").encode()
    return bytes.fromhex(piece[3:5]) if model.is_byte(token) else text


def _byte_tokens(model: Any) -> list[int]:
    """Return the tokens of all 256 bytes; empty if the model has no byte fallback."""
    tokens = [model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return tokens if all(map(model.is_byte, tokens)) else []


def _encodes_lines_independently(model: Any) -> bool:
    """Return whether the tokens of a text are those of its lines, one after another."""
    end = model.piece_to_id("\n")
    by_line = [end, end, *model.encode("a\n"), *model.encode(" b")]
    return bool(end != model.unk_id() and model.encode("\n\na\n b") == by_line)
