"""What all tokenizers share: their files, UTF-8 of any string, and safe places to cut."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
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
        r"(?<=\S\r\n)(?=\S)",
        rb"\n[^\s]",
        ("x\r\n", "the fox.\r\n", "1805\r\n", "a\r\n\r\n b,\r\n", "\u65e5\u672c\u3002\r\n"),
        ("y", "The dog\r\n", "}\r\n", "1234 5", "\u201cA\u201d", "<p>", "\u00e9t\u00e9"),
    ),
    (
        r"(?<=[A-Za-z])(?= [A-Za-z])",
        rb"[A-Za-z] [A-Za-z]",
        ("x", "the fox", "The Dog", "a, b", "f(x) if"),
        (" y", " jumps over", " A b", " else 3\n", " l'\u00e9t\u00e9"),
    ),
)


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


def safe_cuts(
    encode: Callable[[str], list[int]], token_texts: Sequence[bytes]
) -> re.Pattern[str] | None:
    """Return where a text can be divided without changing its tokens; None if nowhere.

    No token may contain such a place, and examples must give equal tokens. They detect
    normalizers that change the start of a text.
    """
    found = [
        place
        for place, inside, ends, starts in _PLACES
        if _is_safe(encode, token_texts, inside, ends, starts)
    ]
    return re.compile("|".join(found)) if found else None


def _is_safe(
    encode: Callable[[str], list[int]],
    token_texts: Sequence[bytes],
    inside: bytes,
    ends: tuple[str, ...],
    starts: tuple[str, ...],
) -> bool:
    if any(re.search(inside, text) for text in token_texts):
        return False
    try:
        return all(
            encode(end + start) == encode(end) + encode(start) for end in ends for start in starts
        )
    except DataError:  # some vocabularies cannot encode every text
        return False
