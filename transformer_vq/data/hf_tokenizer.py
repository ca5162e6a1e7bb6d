"""Tokenizer for Hugging Face tokenizer.json files, read with the `tokenizers` library only."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformer_vq.data.paths import DataError, error_reason
from transformer_vq.data.tokenizers import (
    CONFIG_FILE,
    JSON_FILE,
    Tokenizer,
    read_tokenizer_file,
    safe_cuts,
)
from transformer_vq.errors import missing_extra
from transformer_vq.files import CorruptFileError, read_object, write_json

TEMPLATE_FILE = "chat_template.jinja"
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_EOS_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Settings:
    """What tokenizer_config.json adds to a tokenizer.json."""

    bos_token: str | None
    eos_token: str | None
    chat_template: Any = None
    """A Jinja template, or a list of named ones."""


class HFTokenizer(Tokenizer):
    """The tokens of a Hugging Face tokenizer.

    Encoding adds no special tokens, and their names inside a text are ordinary text. bos and eod
    are the tokenizer's bos and eos; if it has only one of them, that one is both. Special tokens
    decode to nothing. Decoding is exact for byte-level vocabularies without a normalizer.
    path: a .json file; files such as tokenizer_config.json are read if they are next to it.
    sha256: of that file, if known; any other file raises DataError.

    `save` writes the file without truncation and padding, and with a post-processor that puts bos
    before each text. So a tokenizer has the same `sha256` in a run, in an export, and as given.
    """

    file_name = JSON_FILE

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        library = import_tokenizers()
        content = read_tokenizer_file(path, sha256)
        try:
            layout = json.loads(content)
            self._model = library.Tokenizer.from_buffer(content)
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
        self._content = _as_trained(content, layout, self._names[self.bos], self.bos)
        added = self._model.get_added_tokens_decoder()
        special = {token for token, x in added.items() if x.special} | set(ends)
        self.special_tokens = {self._names[token]: token for token in sorted(special)}
        self._texts = self._token_texts(layout)
        for token in ends:
            self._texts[token] = b""
        self._byte_tokens = {x[0]: i for i, x in enumerate(self._texts) if len(x) == 1}
        self._within_names = self._find_names()
        self.cuts = safe_cuts(self.encode, self._texts)

    def token_name(self, token: int) -> str:
        """Return the name of a token in the vocabulary."""
        return self._names[token]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json with its settings."""
        settings = {name: x for name, x in asdict(self.settings).items() if x is not None}
        write_json(folder / CONFIG_FILE, settings)
        self.save_vocabulary(folder)

    def save_vocabulary(self, folder: Path) -> None:
        """Write only tokenizer.json."""
        super().save(folder)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        if self._within_names is not None and any(map(self._within_names.search, texts)):
            pieces = [self._within_names.split(text) for text in texts]
            return [list(chain.from_iterable(self._encode_all(x))) for x in pieces]
        return self._encode_all(texts)

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            if len(texts) == 1:  # without starting threads, which warn if the process is forked
                return [self._model.encode(texts[0], add_special_tokens=False).ids]
            found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise DataError(
                f"the tokenizer cannot encode a text: {error_reason(error)}; use another "
                "--data.tokenizer"
            ) from error
        return [encoding.ids for encoding in found]

    def _find_names(self) -> re.Pattern[str] | None:
        """Return where to cut a text so that names of special tokens in it are encoded as text.

        None if that is not needed. The library's option covers most vocabularies, but for example
        a unigram model can contain the name as an ordinary piece.
        """
        found = []
        for name, token in self.special_tokens.items():
            with suppress(DataError):  # some vocabularies cannot encode every text
                if len(name) > 1 and token in self._encode_all([name])[0]:
                    found.append(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})")
        return re.compile("|".join(found)) if found else None

    def _token_texts(self, layout: dict[str, Any]) -> list[bytes]:
        """Return the UTF-8 text of each token; empty for special tokens and unused ids.

        A space before the first word is kept. layout: the content of tokenizer.json.
        """
        kinds = json.dumps(layout.get("decoder"))
        byte_of = _byte_alphabet() if '"ByteLevel"' in kinds else {}
        has_bytes = '"ByteFallback"' in kinds
        model = layout["model"]
        unknown = model.get("unk_token") or model.get("unk_id")
        added = self._model.get_added_tokens_decoder()

        def text_of(token: int, name: str) -> bytes:
            if unknown in (token, name):
                return "\ufffd".encode()
            if name in self.special_tokens:
                return b""
            if byte_of and token not in added:
                return b"".join(bytes([byte_of[x]]) if x in byte_of else x.encode() for x in name)
            if byte_of:
                return name.encode()
            if has_bytes and (byte := _BYTE.fullmatch(name)):
                return bytes.fromhex(byte[1])
            return self._text_within(name).encode()

        names = self._names
        return [text_of(i, names[i]) if i in names else b"" for i in range(self.vocab_size)]

    def _text_within(self, name: str) -> str:
        """Return what the library decodes a token to if there are tokens before and after it."""
        decoder = self._model.decoder
        if decoder is None:  # the library puts a space between tokens
            return f" {name}"
        whole: str = decoder.decode(["a", name, "a"])
        after: str = decoder.decode(["a", "a"])
        return whole[1 : len(whole) - len(after) + 1]


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
            if not path.with_name(name).exists():
                continue
            try:
                found = read_object(path.with_name(name))
            except CorruptFileError as error:
                raise DataError(f"{error_reason(error)}; restore it") from error
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


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable characters of Latin-1 stand for their own code; the other bytes are the characters
    from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = [*printable, *range(256, 256 + len(others))]
    return {chr(code): byte for code, byte in zip(codes, printable + others, strict=True)}
