"""The text of every token of a Hugging Face tokenizer, so that tokens can be decoded one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_texts(
    model: Any, layout: dict[str, Any], names: dict[int, str], vocab_size: int
) -> list[bytes]:
    """Return the UTF-8 text of each token; empty for special tokens and unused ids.

    Exact for the decoders ByteLevel, Metaspace and ByteFallback, except that a space before the
    first word is kept. For other decoders, each token is decoded as if it were alone.
    model: a `tokenizers.Tokenizer`. layout: the content of its tokenizer.json.
    """
    steps = _steps(layout.get("decoder"))
    text_of = _text_function(model, steps)
    added = model.get_added_tokens_decoder()
    unknown = _unknown_token(layout["model"])
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    texts = []
    for token in range(vocab_size):
        name = names.get(token)
        if name is None:
            texts.append(b"")
        elif unknown in (token, name):
            texts.append("\ufffd".encode())
        elif token in added and added[token].special:
            texts.append(b"")
        elif token in added and is_byte_level:
            texts.append(name.encode())
        else:
            texts.append(text_of(name))
    return texts


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoders of a sequence in one list."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _unknown_token(model: dict[str, Any]) -> int | str | None:
    """Return the id or the name of the token for unknown text."""
    unknown = model.get("unk_token") or model.get("unk_id")
    return unknown if isinstance(unknown, (int, str)) else None


def _text_function(model: Any, steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        byte_of = _byte_alphabet()
        return lambda name: b"".join(
            bytes([byte_of[x]]) if x in byte_of else x.encode() for x in name
        )
    if "WordPiece" in kinds:
        prefix = kinds["WordPiece"].get("prefix", "##")
        return lambda name: (
            name.removeprefix(prefix).encode() if name.startswith(prefix) else f" {name}".encode()
        )
    if "BPEDecoder" in kinds:
        suffix = kinds["BPEDecoder"].get("suffix", "</w>")
        return lambda name: name.replace(suffix, " ").encode()
    replaces_space = any(
        step["type"] == "Replace" and step["pattern"] == {"String": _SPACE} for step in steps
    )
    if replaces_space or "Metaspace" in kinds or "ByteFallback" in kinds:
        space = kinds.get("Metaspace", {}).get("replacement", _SPACE)
        has_bytes = "ByteFallback" in kinds

        def text_of(name: str) -> bytes:
            found = _BYTE.fullmatch(name) if has_bytes else None
            return bytes.fromhex(found[1]) if found else name.replace(space, " ").encode()

        return text_of
    if model.decoder is None:  # the library puts a space between tokens
        return lambda name: f" {name}".encode()
    return lambda name: str(model.decoder.decode([name])).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable characters of Latin-1 stand for their own code; the other bytes are the characters
    from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = [*printable, *range(256, 256 + len(others))]
    return {chr(code): byte for code, byte in zip(codes, printable + others, strict=True)}
