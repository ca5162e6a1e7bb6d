"""What all tokenizers share: their files, UTF-8 of any string, and cuts between lines."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.paths import error_reason, path_kind

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (MODEL_FILE, JSON_FILE)
"""Names under which a vocabulary is saved; CONFIG_FILE is next to JSON_FILE."""

GIVE_TOKENIZER = (
    "--data.tokenizer must be bytes, bpe, sentencepiece, a SentencePiece .model file, a "
    "tokenizer.json, or a folder with either"
)

_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # except those of surrogateescape
_SPANS_LINES = re.compile(rb"\n[^\s]")
_LINE_ENDS = ("x\n", "the fox.\n", "  f(x) {\n", "1805\n", "a\n\n b,\n", "\u65e5\u672c\u3002\n")
_LINE_STARTS = ("y", "The dog\n", "}\n", "1234 5", "\u201cA\u201d", "<p>", "\u00e9t\u00e9")


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


def can_cut_lines(encode: Callable[[str], list[int]], token_texts: Iterable[bytes]) -> bool:
    """Return whether cutting "x\\ny" into "x\\n" and "y" does not change its tokens.

    No token may contain a cut, and examples must give equal tokens. They detect normalizers that
    change the start of a text.
    """
    if any(_SPANS_LINES.search(text) for text in token_texts):
        return False
    try:
        return all(
            encode(end + start) == encode(end) + encode(start)
            for end in _LINE_ENDS
            for start in _LINE_STARTS
        )
    except DataError:  # some vocabularies cannot encode every text
        return False
