"""Support for `transformers serve`, which looks up classes and decodes tokens in its own ways."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode


def add_to_transformers(model_class: type[PreTrainedModel]) -> None:
    """Make a class an attribute of the module `transformers`.

    The server looks up the class that config.json names there, not in the Auto classes. Importing
    parts of transformers replaces the module in `sys.modules`, so the server may hold an earlier
    one.
    """
    modules = [sys.modules["transformers"]]
    manager = sys.modules.get("transformers.cli.serving.model_manager")
    if manager is not None:
        modules.append(manager.transformers)
    for module in modules:
        setattr(module, model_class.__name__, model_class)


def decoding_tokenizer(
    pieces: Sequence[str], added: Mapping[int, AddedToken], is_bytes: bool
) -> Tokenizer:
    """Return a tokenizer of the library tokenizers that only decodes.

    The server streams text with that library's `DecodeStream`. pieces: the names of all tokens, as
    in SentencePiece. added: special tokens and tokens after the last piece. is_bytes: whether the
    first 256 tokens are the bytes; they are decoded jointly, so that an invalid byte does not
    affect others.
    """
    names = list(pieces)
    decoder: decoders.Decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if is_bytes:
        characters = bytes_to_unicode()
        names[:256] = [characters[byte] for byte in range(256)]
        decoder = decoders.ByteLevel()
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    tokenizer.decoder = decoder
    for token, entry in sorted(added.items()):
        name = names[token] if token < len(names) else entry.content
        tokenizer.add_tokens([AddedToken(name, special=entry.special)])
    return tokenizer
