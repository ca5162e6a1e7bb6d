"""Tokenizers: bytes as they are, or the tokens of a vocabulary file.

SentencePiece models are read here, Hugging Face tokenizers in `hf_tokenizer.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from transformer_vq.data.paths import DataError, error_reason, path_kind
from transformer_vq.errors import missing_extra
from transformer_vq.files import atomic_write

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (MODEL_FILE, JSON_FILE)
"""Names under which a vocabulary is saved; CONFIG_FILE is next to JSON_FILE."""

GIVE_TOKENIZER = (
    "--data.tokenizer must be bytes, bpe, a SentencePiece .model file, a tokenizer.json, or a "
    "folder with either"
)

CHUNK_CHARS = 1 << 16  # characters that are tokenized at once, about
MAX_CHUNK_CHARS = 1 << 24  # a text without usable line ends is divided here
_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # except those of surrogateescape
_SPACE = "\u2581"  # SentencePiece's replacement for a space inside pieces
# Places where a text may be divided: a regular expression, the same for the bytes of a token, and
# texts before and after the place. Both sides of a line end must not be white space.
_PLACES: tuple[tuple[str, bytes, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        r"(?<=\S\n)(?=\S)",
        rb"\n[^\s]",
        ("x\n", "the fox.\n", "  f(x) {\n", "1805\n", "a\n\n b,\n", "\u65e5\u672c\u3002\n"),
        ("y", "The dog\n", "}\n", "1234 5", "\u201cA\u201d", "<p>", "\u00e9t\u00e9"),
    ),
    (
        r"(?<=[A-Za-z])(?= [A-Za-z])",
        rb"[A-Za-z] [A-Za-z]",
        ("x", "the fox", "The Dog", "a, b", "f(x) if"),
        (" y", " jumps over", " A b", " else 3\n", " l'\u00e9t\u00e9"),
    ),
)


class Tokenizer:
    """Converts text to tokens and back; subclasses call the library of their vocabulary file."""

    file_name: ClassVar[str]
    """The name of the vocabulary file in a folder."""
    as_bytes: ClassVar[re.Pattern[str]] = re.compile("([\udc80-\udcff]+)")
    """Text that is encoded as bytes if the vocabulary has tokens for them: surrogate escapes."""
    vocab_size: int
    bos: int
    """The token before each document."""
    eod: int | None
    """The token after each document; None if documents have no end token."""
    cuts: re.Pattern[str] | None
    """Places where a text may be divided without changing its tokens; None if there are none."""
    _content: bytes
    """Of the vocabulary file."""
    _texts: list[bytes]
    """The text of each token."""
    _byte_tokens: dict[int, int]

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the library's tokens of valid Unicode texts; use all cores, release the GIL."""
        raise NotImplementedError

    @property
    def sha256(self) -> str | None:
        """Identifies the vocabulary file; None for bytes, which need no file."""
        return hashlib.sha256(self._content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without bos and eod."""
        tokens: list[int] = []
        for i, piece in enumerate(self.as_bytes.split(text)):
            data = utf8(piece)
            if i % 2 and all(byte in self._byte_tokens for byte in data):
                tokens += [self._byte_tokens[byte] for byte in data]
            elif piece:
                tokens += self._encode_texts([data.decode(errors="replace")])[0]
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text as uint32; uses all cores and releases the GIL."""
        if all(text.isascii() or self._is_unicode(text) for text in texts):
            found = self._encode_texts(texts)
        else:
            found = [self.encode(text) for text in texts]
        return [np.array(tokens, dtype=np.uint32) for tokens in found]

    def _is_unicode(self, text: str) -> bool:
        return not (_SURROGATES.search(text) or self.as_bytes.search(text))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return UTF-8 text; it may start or end inside a character of several tokens."""
        return b"".join(self._texts[int(token)] for token in tokens)

    def save(self, folder: Path) -> None:
        """Write to a folder what `load_tokenizer` needs."""
        with atomic_write(folder / self.file_name) as partial:
            partial.write_bytes(self._content)


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; a surrogate escape is encoded as its original byte.

    end_of_document: add token 256, which then is both bos and eod. Otherwise bos is byte 0.
    """

    sha256 = None
    cuts = re.compile("")  # anywhere

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


class SentencePieceTokenizer(Tokenizer):
    """The pieces of a SentencePiece model.

    Models may change a text, for example by adding a space before it. bos and eod are the model's
    bos and eos; if it has only one of them, that one is both.
    path: a .model file. sha256: of that file, if known; any other file raises DataError.
    """

    file_name = MODEL_FILE
    as_bytes = re.compile(f"([{_SPACE}\udc80-\udcff]+)")

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        self._model = import_sentencepiece().SentencePieceProcessor()
        self._content = read_tokenizer_file(path, sha256)
        try:
            self._model.LoadFromSerializedProto(self._content)
            self.vocab_size = int(self._model.get_piece_size())
            bos, eos = int(self._model.bos_id()), int(self._model.eos_id())
            self._texts = [self._text_of(token) for token in range(self.vocab_size)]
            is_byte = self._model.is_byte
            self._byte_tokens = {x[0]: i for i, x in enumerate(self._texts) if is_byte(i)}
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
    def pieces(self) -> list[str]:
        """The name of every token, as in SentencePiece."""
        return [self._model.id_to_piece(token) for token in range(self.vocab_size)]

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        n_threads = min(len(texts), os.cpu_count() or 1)
        found: list[list[int]] = self._model.encode(list(texts), num_threads=max(n_threads, 1))
        return found

    def _text_of(self, token: int) -> bytes:
        """Return the text of a token in UTF-8; empty for control tokens."""
        piece: str = self._model.id_to_piece(token)
        if self._model.is_control(token):
            return b""
        if self._model.is_byte(token):
            return bytes.fromhex(piece[3:5])
        return ("\ufffd" if self._model.is_unknown(token) else piece.replace(_SPACE, " ")).encode()


def import_sentencepiece() -> Any:
    """Import the optional package sentencepiece; raise MissingExtraError if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by some versions
            import sentencepiece
    except ImportError:
        raise missing_extra("a SentencePiece vocabulary", "sentencepiece") from None
    return sentencepiece


def utf8(text: str) -> bytes:
    """Return UTF-8; a surrogate escape becomes its original byte, other surrogates U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text).encode("utf-8", "surrogateescape")


def read_tokenizer_file(path: Path, sha256: str | None = None) -> bytes:
    """Return the content of a file; raise DataError if its SHA-256 is known and different."""
    if path_kind(path, GIVE_TOKENIZER) != "file":
        raise DataError(f"{path} is a folder; {GIVE_TOKENIZER}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the vocabulary {path}: {error_reason(error)}") from error
    if sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise DataError(
            f"{path} is corrupt or another vocabulary: its SHA-256 does not match; restore it"
        )
    return content


def divide(text: str, limit: int, cuts: re.Pattern[str]) -> list[str]:
    """Divide a text at `cuts` into chunks of at least `limit` characters; the rest is last."""
    found, start = [], 0
    while len(text) - start >= limit:
        match = cuts.search(text, start + limit, start + MAX_CHUNK_CHARS + 1)
        if match is not None:
            end = match.start()
        elif len(text) - start > MAX_CHUNK_CHARS:
            end = start + MAX_CHUNK_CHARS
        else:
            break
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def safe_cuts(
    encode: Callable[[str], list[int]], token_texts: Sequence[bytes]
) -> re.Pattern[str] | None:
    """Return where a text can be divided without changing its tokens; None if nowhere.

    No token may contain such a place, and examples must give equal tokens. They detect
    normalizers that change the start of a text.
    """
    found = []
    for place, inside, ends, starts in _PLACES:
        if any(re.search(inside, text) for text in token_texts):
            continue
        try:
            if all(encode(a + b) == encode(a) + encode(b) for a in ends for b in starts):
                found.append(place)
        except DataError:  # some vocabularies cannot encode every text
            continue
    return re.compile("|".join(found)) if found else None


def open_tokenizer(
    path: Path, end_of_document: bool = False, sha256: str | None = None
) -> Tokenizer:
    """Open a tokenizer that a user gave: a .model file, a tokenizer.json, or a folder with either.

    end_of_document: whether to use the vocabulary's token for the end of a text as `eod`.
    sha256: of the file, if known; any other file raises DataError.
    """
    from transformer_vq.data.hf_tokenizer import HFTokenizer

    if path.name == "sentencepiece" and not os.path.lexists(path):
        raise DataError(f"SentencePiece vocabularies are not learned; {GIVE_TOKENIZER}")
    if path_kind(path, GIVE_TOKENIZER) == "folder":
        found = [path / name for name in (JSON_FILE, MODEL_FILE) if os.path.lexists(path / name)]
        if not found:
            raise DataError(f"{path} has no {JSON_FILE} and no {MODEL_FILE}; {GIVE_TOKENIZER}")
        path = found[0]
    kind = HFTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    return kind(path, sha256, end_of_document)


def load_tokenizer(
    folder: Path, sha256: str | None = None, end_of_document: bool = False
) -> Tokenizer:
    """Load the tokenizer that was saved in a folder; a ByteTokenizer if there is no file.

    sha256: of the saved vocabulary, if known; a missing or different file raises DataError.
    """
    if os.path.lexists(folder / JSON_FILE) and not os.path.lexists(folder / CONFIG_FILE):
        raise DataError(f"{folder / CONFIG_FILE} does not exist; restore it")
    if sha256 is None and not any(os.path.lexists(folder / name) for name in TOKENIZER_FILES):
        return ByteTokenizer(end_of_document)
    return open_tokenizer(folder, end_of_document, sha256)
