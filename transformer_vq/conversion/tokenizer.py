"""The tokenizer and the generation settings of a pretrained model."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformer_vq.conversion.sources import Source
from transformer_vq.data.paths import error_reason
from transformer_vq.data.tokenizers import (
    CONFIG_FILE,
    EOS_NAMES,
    JSON_FILE,
    MODEL_FILE,
    TEMPLATE_FILE,
    Tokenizer,
    open_tokenizer,
)
from transformer_vq.errors import UserError, import_extra
from transformer_vq.files import read_object, write_json
from transformer_vq.training.loading import GENERATION, SAMPLING


def generation_settings(source: Source) -> dict[str, Any]:
    """Return temperature, top_p and top_k, and the tokens that end a text as eos_token_id."""
    path = source.folder / GENERATION
    given = read_object(path) if source.gguf is None and path.is_file() else {}
    stops: set[int] = set()
    for ids in (given.get("eos_token_id"), source.config.get("eos_token_id")):
        stops |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    found = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    return found | {"eos_token_id": sorted(stops)}


def source_tokenizer(source: Source, stops: list[int]) -> Tokenizer | None:
    """Return the tokenizer with its chat template; None if the source has none.

    Documents end with the vocabulary's end of text, as in the training of such models; the ends of
    messages, which are the other `stops`, also end generation. If the tokenizer puts no bos before
    a text, documents also start with that token.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if source.gguf is not None or not (source.folder / JSON_FILE).is_file():
            if source.gguf is None and not (source.folder / MODEL_FILE).is_file():
                return None
            _save_fast(source, folder)
        else:
            for name in (JSON_FILE, CONFIG_FILE, TEMPLATE_FILE):
                if (source.folder / name).is_file():
                    shutil.copyfile(source.folder / name, folder / name)
        config = read_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
        model = _read_model(folder / JSON_FILE, source.name)
        names = {token: name for name, token in model.get_vocab().items()}
        special = {x.content for x in model.get_added_tokens_decoder().values() if x.special}
        bos, eos = (_content(config.get(f"{x}_token")) for x in ("bos", "eos"))
        end = next((name for name in EOS_NAMES if name in special), eos)
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos is not None and names.get(next(iter(model.encode("a").ids), -1)) == bos
        settings = {
            "bos_token": bos if adds_bos else end or bos,
            "eos_token": end,
            "stop_tokens": [x for x in dict.fromkeys([eos, *map(names.get, stops)]) if x],
            "padded_vocab_size": source.config["vocab_size"],
        }
        write_json(folder / CONFIG_FILE, config | settings)
        tokenizer = open_tokenizer(folder, end_of_document=True)
    if tokenizer.vocab_size > source.config["vocab_size"]:
        sizes = f"{tokenizer.vocab_size:,} tokens, the model {source.config['vocab_size']:,}"
        raise UserError(f"{source.name}: the tokenizer has {sizes}; use the tokenizer of the model")
    return tokenizer


def _save_fast(source: Source, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, or of a folder without tokenizer.json, as one."""
    transformers = import_extra("transformers", "tvq convert", "transformers>=5")
    metadata = source.metadata or {}
    try:
        if source.gguf is None:
            fast = transformers.AutoTokenizer.from_pretrained(source.folder)
        else:  # away from other files, which transformers would prefer
            (folder / "model.gguf").symlink_to(source.gguf.absolute())
            fast = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        if metadata.get("tokenizer.ggml.pre") == "smollm":  # transformers leaves the digits out
            pre = import_extra("tokenizers", "a tokenizer").pre_tokenizers
            parts = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
            fast.backend_tokenizer.pre_tokenizer = pre.Sequence(parts)
        fast.save_pretrained(folder)
    except Exception as error:  # of many kinds
        problem = f"cannot read the tokenizer of {source.name} ({error_reason(error):.150})"
        raise UserError(f"{problem}; copy the model again") from error
    if source.gguf is not None:
        is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))
        config = read_object(folder / CONFIG_FILE) | {"add_bos_token": adds_bos}
        write_json(folder / CONFIG_FILE, config)


def _read_model(path: Path, name: str) -> Any:
    try:
        return import_extra("tokenizers", "a tokenizer").Tokenizer.from_file(str(path))
    except Exception as error:
        problem = f"the tokenizer of {name} is invalid ({error_reason(error):.100})"
        raise UserError(f"{problem}; copy it again") from error


def _content(token: Any) -> str | None:
    """Return a token, which is stored as text or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
