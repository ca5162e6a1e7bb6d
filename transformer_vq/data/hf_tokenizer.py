"""Tokenizer for Hugging Face tokenizer.json files, read with the `tokenizers` library only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_vq.data.paths import DataError, error_reason
from transformer_vq.data.tokenizers import (
    CONFIG_FILE,
    JSON_FILE,
    read_tokenizer_file,
    safe_cuts,
    utf8,
)
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import (
    atomic_write,
    read_json,
    write_json,
)

TEMPLATE_FILE = "chat_template.jinja"
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_EOS_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")
_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_ESCAPES = re.compile("([\udc80-\udcff]+)")


@dataclass(frozen=True)
class Settings:
    """What tokenizer_config.json adds to a tokenizer.json."""

    bos_token: str | None
    eos_token: str | None
    chat_template: Any = None
    """A Jinja template, or a list of named ones."""


class HFTokenizer:
    """The tokens of a Hugging Face tokenizer.

    Encoding adds no special tokens, and their names inside a text are ordinary text. bos and eod
    are the tokenizer's bos and eos; if it has only one of them, that one is both. Special tokens
    decode to nothing. Decoding is exact for byte-level vocabularies without a normalizer.
    path: a .json file; files such as tokenizer_config.json are read if they are next to it.
    sha256: of that file, if known; any other file raises DataError.

    `save` writes the file without truncation and padding, and with a post-processor that puts bos
    before each text. So a tokenizer has the same `sha256` in a run, in an export, and as given.
    """

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        library = import_tokenizers()
        self._file = read_tokenizer_file(path, sha256)
        try:
            layout = json.loads(self._file)
            self._model = library.Tokenizer.from_buffer(self._file)
            self._model.no_truncation()
            self._model.no_padding()
            self._model.encode_special_tokens = True
            vocab: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
            self.vocab_size = max(len(vocab), 1 + max(vocab.values()))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            reason = " ".join(str(error).split())[:80]
            raise DataError(
                f"{path} is not a Hugging Face tokenizer or is corrupt ({reason}); copy it again"
            ) from error
        self.settings = _read_settings(path, self._model)
        named = [self.settings.bos_token, self.settings.eos_token]
        ends = [_token_id(path, vocab, name) for name in named if name is not None]
        if not ends:
            raise DataError(
                f"{path} has no bos and no eos token; name one of its tokens in {CONFIG_FILE} "
                'next to it, as {"eos_token": "..."}'
            )
        self.bos, self.eod = ends[0], ends[-1] if end_of_document else None
        self._names = {token: name for name, token in vocab.items()}
        self._file = _as_trained(self._file, layout, self._names[self.bos], self.bos)
        self._texts = token_texts(self._model, layout, self._names, self.vocab_size)
        for token in ends:
            self._texts[token] = b""
        self._byte_tokens = {x[0]: i for i, x in enumerate(self._texts) if len(x) == 1}
        self._cuts = self._find_cuts(ends)
        self.cuts = safe_cuts(self.encode, self._texts)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the tokenizer.json file that `save` writes."""
        return hashlib.sha256(self._file).hexdigest()

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens of the vocabulary by name, such as those that chat templates write."""
        added = self._model.get_added_tokens_decoder()
        named = (self.settings.bos_token, self.settings.eos_token)
        return {
            name: token
            for token, name in self._names.items()
            if name in named or (token in added and added[token].special)
        }

    def token_name(self, token: int) -> str:
        """Return the name of a token in the vocabulary."""
        return self._names[token]

    def encode(self, text: str) -> list[int]:
        """Return the library's ids; surrogate escapes become bytes if there are tokens for them."""
        parts = [text] if self._cuts is None else self._cuts.split(text)
        return [token for part in parts for token in self._encode(part)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._cuts is not None and any(map(self._cuts.search, texts)):
            return [np.array(self.encode(text), dtype=np.uint32) for text in texts]
        try:
            found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # the library rejects surrogates
            return [np.array(self.encode(text), dtype=np.uint32) for text in texts]
        except Exception as error:
            raise _encoding_error(error) from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in found]

    def _find_cuts(self, ends: list[int]) -> re.Pattern[str] | None:
        """Return where to cut a text so that names of special tokens in it are encoded as text.

        None if that is not needed. The library's option covers most vocabularies, but for example
        a unigram model can contain the name as an ordinary piece.
        """
        added = self._model.get_added_tokens_decoder()
        special = {token for token, x in added.items() if x.special} | set(ends)
        found = []
        for token in sorted(special):
            name = self._names[token]
            with suppress(DataError):  # some vocabularies cannot encode every text
                if len(name) > 1 and token in self._encode(name):
                    found.append(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})")
        return re.compile("|".join(found)) if found else None

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._model.encode(text, add_special_tokens=False).ids)
        except TypeError:  # the library rejects surrogates
            pass
        except Exception as error:
            raise _encoding_error(error) from error
        tokens: list[int] = []
        for i, part in enumerate(_ESCAPES.split(text)):
            data = utf8(part)
            if i % 2 and all(byte in self._byte_tokens for byte in data):
                tokens += [self._byte_tokens[byte] for byte in data]
            elif part:
                tokens += self._encode(data.decode(errors="replace"))
        return tokens

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._texts[int(token)] for token in tokens)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json with its settings."""
        settings = {name: x for name, x in asdict(self.settings).items() if x is not None}
        write_json(folder / CONFIG_FILE, settings)
        self.save_vocabulary(folder)

    def save_vocabulary(self, folder: Path) -> None:
        """Write only tokenizer.json."""
        with atomic_write(folder / JSON_FILE) as partial:
            partial.write_bytes(self._file)


def import_tokenizers() -> Any:
    """Import the optional package tokenizers; raise MissingExtraError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("a BPE or Hugging Face tokenizer", "tokenizers") from None
    return tokenizers


def _read_settings(path: Path, model: Any) -> Settings:
    """Return bos, eos and chat template of the files next to a tokenizer.json.

    If no file names bos or eos, they are recognized by common names among the special tokens.
    """
    given: dict[str, Any] = {}
    if path.name == JSON_FILE:  # files next to other names may belong to another tokenizer
        for name in ("special_tokens_map.json", CONFIG_FILE):
            found = _read_object(path.with_name(name))
            given |= {key: value for key, value in found.items() if value is not None}
        template = path.with_name(TEMPLATE_FILE)
        if template.is_file():
            given["chat_template"] = template.read_text("utf-8", errors="replace")
    bos, eos = (_content(given.get(name)) for name in ("bos_token", "eos_token"))
    if bos is None and eos is None:
        special = {x.content for x in model.get_added_tokens_decoder().values() if x.special}
        bos, eos = (
            next((name for name in names if name in special), None)
            for names in (_BOS_NAMES, _EOS_NAMES)
        )
    return Settings(bos, eos, given.get("chat_template"))


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        value = read_json(path)
    except UserError as error:
        raise DataError(f"{error_reason(error)}; restore it") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object; restore it")
    return value


def _content(token: Any) -> str | None:
    """Return the name of a token, which may be stored as text or as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _token_id(path: Path, vocab: dict[str, int], name: str) -> int:
    if name not in vocab:
        raise DataError(
            f"{path} has no token {name!r}, which a file next to it names; fix {CONFIG_FILE}"
        )
    return vocab[name]


def _as_trained(content: bytes, layout: dict[str, Any], bos_name: str, bos: int) -> bytes:
    """Return a tokenizer.json that puts bos before each text and neither truncates nor pads."""
    special = {"SpecialToken": {"id": bos_name, "type_id": 0}}
    text, other = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    changes = {
        "truncation": None,
        "padding": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text, other],
            "special_tokens": {bos_name: {"id": bos_name, "ids": [bos], "tokens": [bos_name]}},
        },
    }
    if all(layout.get(name) == value for name, value in changes.items()):
        return content  # as saved, perhaps formatted by another version
    return json.dumps(layout | changes, ensure_ascii=False, separators=(",", ":")).encode()


def _encoding_error(error: Exception) -> DataError:
    return DataError(
        f"the tokenizer cannot encode a text: {error_reason(error)}; use another --data.tokenizer"
    )


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
