"""Tokenizers: bytes as they are, or the tokens of a vocabulary file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from transformer_vq.data.hf_tokenizer import HFTokenizer
from transformer_vq.data.sentencepiece_tokenizer import SentencePieceTokenizer
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.paths import path_kind
from transformer_vq.data.tokenizer_files import (
    CONFIG_FILE,
    GIVE_TOKENIZER,
    JSON_FILE,
    MODEL_FILE,
    TOKENIZER_FILES,
    utf8,
)
from transformer_vq.data.tokenizer_training import learn_tokenizer

__all__ = [
    "JSON_FILE",
    "MODEL_FILE",
    "TOKENIZER_FILES",
    "ByteTokenizer",
    "HFTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "learn_tokenizer",
    "load_tokenizer",
    "open_tokenizer",
]


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocab_size: int
    bos: int
    """The token before each document."""
    eod: int | None
    """The token after each document; None if documents have no end token."""
    cuts: re.Pattern[str] | None
    """Places where a text may be divided without changing its tokens; None if there are none."""

    @property
    def sha256(self) -> str | None:
        """Identifies the vocabulary file; None for bytes, which need no file."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without bos and eod."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text as uint32; uses all cores and releases the GIL."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return UTF-8 text; it may start or end inside a character of several tokens."""

    def save(self, folder: Path) -> None:
        """Write to a folder what `load_tokenizer` needs."""


class ByteTokenizer:
    """One token per UTF-8 byte; a surrogate escape is encoded as its original byte.

    end_of_document: add token 256, which then is both bos and eod. Otherwise bos is byte 0.
    """

    sha256 = None
    cuts: re.Pattern[str] | None = re.compile("")  # anywhere

    def __init__(self, end_of_document: bool = False) -> None:
        self.vocab_size = 257 if end_of_document else 256
        self.bos = 256 if end_of_document else 0
        self.eod = 256 if end_of_document else None

    @property
    def pieces(self) -> list[str]:
        """The name of every token."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        return names if self.eod is None else [*names, "<|endoftext|>"]

    @property
    def special_tokens(self) -> dict[str, int]:
        """The token after each document by name, as chat templates write it."""
        return {} if self.eod is None else {self.pieces[self.eod]: self.eod}

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(int(token) for token in tokens if token != self.eod)

    def save(self, folder: Path) -> None:
        """Do nothing: bytes need no file."""


def open_tokenizer(path: Path, end_of_document: bool = False) -> Tokenizer:
    """Open a tokenizer that a user gave: a .model file, a tokenizer.json, or a folder with either.

    end_of_document: whether to use the vocabulary's token for the end of a text as `eod`.
    """
    if path_kind(path, GIVE_TOKENIZER) == "folder":
        found = [path / name for name in (JSON_FILE, MODEL_FILE) if os.path.lexists(path / name)]
        if not found:
            raise DataError(f"{path} has no {JSON_FILE} and no {MODEL_FILE}; {GIVE_TOKENIZER}")
        path = found[0]
    kind = HFTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    return kind(path, None, end_of_document)


def load_tokenizer(
    folder: Path, sha256: str | None = None, end_of_document: bool = False
) -> Tokenizer:
    """Load the tokenizer that was saved in a folder; a ByteTokenizer if there is no file.

    sha256: of the saved vocabulary, if known; a missing or different file raises DataError.
    """
    if os.path.lexists(folder / MODEL_FILE):
        return SentencePieceTokenizer(folder / MODEL_FILE, sha256, end_of_document)
    if os.path.lexists(folder / JSON_FILE):
        if not os.path.lexists(folder / CONFIG_FILE):
            raise DataError(f"{folder / CONFIG_FILE} does not exist; restore it")
        return HFTokenizer(folder / JSON_FILE, sha256, end_of_document)
    if sha256 is not None:
        raise DataError(f"{folder} has no {MODEL_FILE} and no {JSON_FILE}; restore the tokenizer")
    return ByteTokenizer(end_of_document)
