"""Tokenizers: bytes as they are, SentencePiece models, and Hugging Face tokenizer.json files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from transformer_vq.data.paths import DataError, error_reason, path_kind
from transformer_vq.errors import import_extra
from transformer_vq.files import atomic_write, read_object, write_json

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (MODEL_FILE, JSON_FILE)
"""Names under which a vocabulary is saved; CONFIG_FILE is next to JSON_FILE."""

GIVE_TOKENIZER = "--data.tokenizer must be bytes, bpe, a SentencePiece .model or a tokenizer.json"

CHUNK_CHARS = 1 << 16  # characters that are tokenized at once, about
MAX_CHUNK_CHARS = 1 << 24  # a text without usable line ends is divided here
_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # except those of surrogateescape
_SPACE = "\u2581"  # SentencePiece's replacement for a space inside pieces
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Examples of texts before and after a line end, to find out if a text may be divided there. Both
# sides of a line end must not be white space.
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_ENDS = ("x\n", "the fox.\n", "  f(x) {\n", "1805\n", "a\n\n b,\n", "\u65e5\u672c\u3002\n")
_STARTS = ("y", "The dog\n", "}\n", "1234 5", "\u201cA\u201d", "<p>", "\u00e9t\u00e9")


class Tokenizer:
    """Converts text to tokens and back; subclasses call the library of their vocabulary file."""

    file_name: ClassVar[str]
    """The name of the vocabulary file in a folder."""
    vocab_size: int
    bos: int
    """The token before each document."""
    eod: int | None
    """The token after each document; None if documents have no end token."""
    stops: tuple[int, ...] = ()
    """Further tokens that end a text, such as the end of a message."""
    cuts: re.Pattern[str] | None
    """Places where a text may be divided without changing its tokens; None if there are none."""
    _content: bytes
    """Of the vocabulary file."""
    _texts: list[bytes]
    """The text of each token."""

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the library's tokens of valid Unicode texts; use all cores, release the GIL."""
        raise NotImplementedError

    @property
    def sha256(self) -> str | None:
        """Identifies the vocabulary file; None for bytes, which need no file."""
        return hashlib.sha256(self._content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without bos and eod; surrogates are read as U+FFFD."""
        return self._encode_texts([utf8(text).decode(errors="replace")])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text as uint32; uses all cores and releases the GIL."""
        found = self._encode_texts([utf8(text).decode(errors="replace") for text in texts])
        return [np.array(tokens, dtype=np.uint32) for tokens in found]

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
    """The pieces of a SentencePiece model, which may change a text, as by a space before it.

    bos and eod are the model's bos and eos; if it has only one of them, that one is both.
    path: a .model file. sha256: of that file, if known; any other file raises DataError.
    """

    file_name = MODEL_FILE

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        library = import_extra("sentencepiece", "a SentencePiece vocabulary")
        self._model = library.SentencePieceProcessor()
        self._content = _read(path, sha256)
        try:
            self._model.LoadFromSerializedProto(self._content)
            self.vocab_size = int(self._model.get_piece_size())
            bos, eos = int(self._model.bos_id()), int(self._model.eos_id())
            self._texts = [self._text_of(token) for token in range(self.vocab_size)]
            self.cuts = _safe_cuts(self._model.encode, self._texts)
        except Exception as error:  # SentencePiece raises many kinds of errors for corrupt files
            raise DataError(f"{path} is not a SentencePiece model; copy it again") from error
        if max(bos, eos) < 0:
            raise DataError(f"{path} has no bos piece; train it with the option bos_id")
        self.bos = bos if bos >= 0 else eos
        self.eod = None if not end_of_document else eos if eos >= 0 else bos

    @property
    def pieces(self) -> list[str]:
        """The name of every token, as in SentencePiece."""
        return [self._model.id_to_piece(token) for token in range(self.vocab_size)]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        n_threads = max(1, min(len(texts), os.cpu_count() or 1))
        found: list[list[int]] = self._model.encode(texts, num_threads=n_threads)
        return found

    def _text_of(self, token: int) -> bytes:
        """Return the text of a token in UTF-8; empty for control tokens."""
        piece: str = self._model.id_to_piece(token)
        if self._model.is_control(token):
            return b""
        if self._model.is_byte(token):
            return bytes.fromhex(piece[3:5])
        return ("\ufffd" if self._model.is_unknown(token) else piece.replace(_SPACE, " ")).encode()


class HFTokenizer(Tokenizer):
    """The tokens of a Hugging Face tokenizer.

    Encoding adds no special tokens, and their names inside a text are ordinary text. bos and eod
    are the tokenizer's bos and eos; if it has only one of them, that one is both. Special tokens
    decode to nothing. Decoding is exact for byte-level vocabularies without a normalizer.
    path: a .json file; tokenizer_config.json is read if it is next to it. sha256: of that file.

    `save` writes the file without truncation and padding, and with a post-processor that puts bos
    before each text. So a tokenizer has the same `sha256` in a run, in an export, and as given.
    """

    file_name = JSON_FILE

    def __init__(
        self, path: Path, sha256: str | None = None, end_of_document: bool = False
    ) -> None:
        library = import_extra("tokenizers", "a BPE or Hugging Face tokenizer")
        content = _read(path, sha256)
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
            problem = f"{path} is not a Hugging Face tokenizer ({error_reason(error):.80})"
            raise DataError(f"{problem}; copy it again") from error
        self.settings = _read_settings(path, self._model)
        named = [self.settings[x] for x in ("bos_token", "eos_token") if x in self.settings]
        ends = [vocab[name] for name in named if name in vocab]
        if not ends or len(ends) < len(named):
            problem = f"{path} has no bos and no eos token, or not those of {CONFIG_FILE}"
            raise DataError(problem + '; name one of its tokens there: {"eos_token": "..."}')
        self.bos, self.eod = ends[0], ends[-1] if end_of_document else None
        self.stops = tuple(vocab[x] for x in self.settings.get("stop_tokens", ()) if x in vocab)
        self.vocab_size = max(self.vocab_size, self.settings.get("padded_vocab_size", 0))
        self.names = {token: name for name, token in vocab.items()}
        self._content = _as_trained(content, layout, self.names[self.bos], self.bos)
        added = self._model.get_added_tokens_decoder()
        special = {token for token, x in added.items() if x.special} | set(ends)
        self.special_tokens = {self.names[token]: token for token in sorted(special)}
        unknown = vocab.get(layout["model"].get("unk_token"), layout["model"].get("unk_id"))
        self._spelled = {  # some vocabularies list special tokens as pieces of text
            token: [x for letter in name if (x := vocab.get(letter, unknown)) is not None]
            for name, token in self.special_tokens.items()
            if token != unknown
        }
        self._texts = self._token_texts(layout)
        for token in ends:
            self._texts[token] = b""
        self.cuts = _safe_cuts(self.encode, self._texts)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json with its settings."""
        write_json(folder / CONFIG_FILE, self.settings)
        super().save(folder)

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        spelled = self._spelled
        try:
            if len(texts) == 1:  # without starting threads, which warn if the process is forked
                found = [self._model.encode(texts[0], add_special_tokens=False)]
            else:
                found = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            problem = f"the tokenizer cannot encode a text: {error_reason(error)}"
            raise DataError(f"{problem}; use another --data.tokenizer") from error
        return [
            ids if spelled.keys().isdisjoint(ids) else [y for x in ids for y in spelled.get(x, [x])]
            for ids in (encoding.ids for encoding in found)
        ]

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

        decoder = self._model.decoder

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
            if decoder is None:  # the library puts a space between tokens
                return f" {name}".encode()
            whole: str = decoder.decode(["a", name, "a"])  # as between other tokens
            return whole[1 : len(whole) - len(decoder.decode(["a", "a"])) + 1].encode()

        names = self.names
        return [text_of(i, names[i]) if i in names else b"" for i in range(self.vocab_size)]


def _read_settings(path: Path, model: Any) -> dict[str, Any]:
    """Return bos_token, eos_token, chat_template and so on of the files next to a tokenizer.json.

    stop_tokens are further tokens that end a text. padded_vocab_size is that of a model that has
    more tokens than the vocabulary, which have no text.

    If no file names bos or eos, they are recognized by common names among the special tokens.
    """
    found: dict[str, Any] = {}
    config, template = path.with_name(CONFIG_FILE), path.with_name(TEMPLATE_FILE)
    if path.name == JSON_FILE and config.exists():  # otherwise of another tokenizer
        given = read_object(config)
        for name in ("bos_token", "eos_token"):  # stored as text or as an object
            token = given.get(name)
            found[name] = token.get("content") if isinstance(token, dict) else token
        for name in ("chat_template", "stop_tokens", "padded_vocab_size"):
            found[name] = given.get(name)
    if path.name == JSON_FILE and template.is_file():
        found["chat_template"] = template.read_text("utf-8", errors="replace")
    if not (found.get("bos_token") or found.get("eos_token")):
        special = {x.content for x in model.get_added_tokens_decoder().values() if x.special}
        found["bos_token"] = next((name for name in _BOS_NAMES if name in special), None)
        found["eos_token"] = next((name for name in EOS_NAMES if name in special), None)
    return {name: value for name, value in found.items() if value is not None}


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

    Printable characters of Latin-1 stand for their own code; other bytes are characters from 256.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = [*printable, *range(256, 256 + len(others))]
    return {chr(code): byte for code, byte in zip(codes, printable + others, strict=True)}


def utf8(text: str) -> bytes:
    """Return UTF-8; a surrogate escape becomes its original byte, other surrogates U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text).encode("utf-8", "surrogateescape")


def _read(path: Path, sha256: str | None) -> bytes:
    """Return the content of a file; raise DataError if its SHA-256 is known and different."""
    if path.exists():
        path_kind(path, GIVE_TOKENIZER)  # a pipe would block
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error_reason(error)}; {GIVE_TOKENIZER}") from error
    if sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise DataError(f"{path} is corrupt or another vocabulary; restore it")
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


def _safe_cuts(
    encode: Callable[[str], list[int]], token_texts: Sequence[bytes]
) -> re.Pattern[str] | None:
    """Return line ends if a text can be divided there without changing its tokens, else None.

    No token may contain such a place, and examples, which detect normalizers, give equal tokens.
    """
    if any(re.search(rb"\n[^\s]", text) for text in token_texts):
        return None
    try:
        is_safe = all(encode(a + b) == encode(a) + encode(b) for a in _ENDS for b in _STARTS)
    except DataError:  # some vocabularies cannot encode every text
        return None
    return _LINE_END if is_safe else None


def open_tokenizer(
    path: Path, end_of_document: bool = False, sha256: str | None = None
) -> Tokenizer:
    """Open a tokenizer that a user gave: a .model file, a tokenizer.json, or a folder with either.

    The arguments are those of `HFTokenizer` and `SentencePieceTokenizer`.
    """
    if path.is_dir():
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
    if sha256 is None and not any(os.path.lexists(folder / name) for name in TOKENIZER_FILES):
        exported = folder / "config.json"  # its model may need a vocabulary, which was lost
        size = read_object(exported).get("vocab_size", 0) if exported.is_file() else 0
        if size > ByteTokenizer(True).vocab_size:
            files = " or ".join(TOKENIZER_FILES)
            raise DataError(f"{folder} has {size:,} tokens, but no {files}; copy it again")
        return ByteTokenizer(end_of_document)
    return open_tokenizer(folder, end_of_document, sha256)
