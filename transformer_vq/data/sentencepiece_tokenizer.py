"""Tokenizer for SentencePiece vocabularies."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Sequence
from io import StringIO
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.tokenizer_files import MODEL_FILE, read_tokenizer_file, safe_cuts, utf8
from transformer_vq.errors import missing_extra
from transformer_vq.files import atomic_write

_SPACE = "\u2581"  # SentencePiece's replacement for a space inside pieces
_AS_BYTES = re.compile(f"([{_SPACE}\ud800-\udfff]+)")


class SentencePieceTokenizer:
    """The pieces of a SentencePiece model.

    Decoding is exact for vocabularies of `train_sentencepiece`. Other models may change a text, for
    example by adding a space before it. bos and eod are the model's bos and eos; if it has only one
    of them, that one is both.
    path: a .model file. sha256: of that file, if known; any other file raises DataError.
    """

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        self._model = import_sentencepiece().SentencePieceProcessor()
        self._file = read_tokenizer_file(path, sha256)
        try:
            self._model.LoadFromSerializedProto(self._file)
            self.vocab_size = int(self._model.get_piece_size())
            bos, eos = int(self._model.bos_id()), int(self._model.eos_id())
            self._texts = [_text_of(self._model, token) for token in range(self.vocab_size)]
            self._byte_tokens = _byte_tokens(self._model)
            self._by_line = _encodes_lines_independently(self._model)
            self.cuts = safe_cuts(self._model.encode, self._texts)
        except Exception as error:  # SentencePiece raises many kinds of errors for corrupt files
            raise DataError(
                f"{path} is not a SentencePiece model or is corrupt; copy it again"
            ) from error
        if max(bos, eos) < 0:
            raise DataError(f"{path} has no bos piece; train it with the option bos_id")
        self.bos = bos if bos >= 0 else eos
        self.eod = None if not end_of_document else eos if eos >= 0 else bos

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
        if not _needs_bytes(text):
            return self._encode(text)
        if not self._byte_tokens:
            return self._encode(utf8(text).decode(errors="replace"))
        tokens: list[int] = []
        for i, part in enumerate(_AS_BYTES.split(text)):
            tokens += [self._byte_tokens[b] for b in utf8(part)] if i % 2 else self._encode(part)
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if any(map(_needs_bytes, texts)):
            return [np.array(self.encode(text), dtype=np.uint32) for text in texts]
        parts = [self._parts(text) for text in texts]
        encoded = self._model.encode(list(chain.from_iterable(parts)), num_threads=os.cpu_count())
        ends = accumulate(map(len, parts))
        return [
            np.array(list(chain.from_iterable(encoded[end - len(part) : end])), dtype=np.uint32)
            for part, end in zip(parts, ends, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._texts[int(token)] for token in tokens)

    def save(self, folder: Path) -> None:
        with atomic_write(folder / MODEL_FILE) as partial:
            partial.write_bytes(self._file)

    def _encode(self, text: str) -> list[int]:
        return list(chain.from_iterable(self._model.encode(self._parts(text), num_threads=1)))

    def _parts(self, text: str) -> list[str]:
        # Encoding a book line by line takes a third of the time of encoding it at once.
        return StringIO(text, newline="\n").readlines() if self._by_line else [text]


def import_sentencepiece() -> Any:
    """Import the optional package sentencepiece; raise MissingExtraError if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by some versions
            import sentencepiece
    except ImportError:
        raise missing_extra("a SentencePiece vocabulary", "sentencepiece") from None
    return sentencepiece


def _needs_bytes(text: str) -> bool:
    return not text.isascii() and _AS_BYTES.search(text) is not None


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
