"""The model that a run starts from: a new one, or that of `train.init_from` for fine-tuning.

`train.init_from` is a run folder, a model file, or a folder that `tvq export` wrote for Hugging
Face transformers. transformers itself is not needed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.tokenizers import (
    TOKENIZER_FILES,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)
from transformer_vq.device import meta_device
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.training.checkpoint import (
    CONFIG,
    CheckpointError,
    load_model,
    read_config,
    read_tokenizer,
)
from transformer_vq.training.loading import exported_config, is_export, load_export
from transformer_vq.training.packaged import find_run

# Fields of a model config that affect its training, but not the function it computes.
TRAINING_FIELDS = frozenset(
    {
        *("p_dropsin", "p_dropres", "p_droplyr", "commit_coef", "grad_through_cache"),
        *("ema_decay", "codebook_init", "revive_below"),
    }
)


def initial_model_config(init_from: str | os.PathLike[str]) -> ModelConfig:
    """Return the model config of a run folder, model file or exported folder.

    Raises CheckpointError if it is none of them.
    """
    path = _existing(init_from)
    if path.is_file():
        return _config_of_file(path)
    return exported_config(path) if is_export(path) else read_config(path).model


def with_initial_tokenizer(config: RunConfig) -> RunConfig:
    """Return the config of a run with the tokenizer of `train.init_from`, if it names no other.

    Raises CheckpointError if the data will have other bytes than the model. Other vocabularies are
    known only when the data are prepared; see `check_vocabulary`.
    """
    source = config.train.init_from
    if source is None:
        return config
    path = next((p for n in TOKENIZER_FILES if (p := _existing(source) / n).is_file()), None)
    if path is not None and config.data.tokenizer is None and not config.data.has_images:
        return replace(config, data=replace(config.data, tokenizer=str(path)))
    if config.data.tokenizer_name == "bytes":
        _check_tokens(config, ByteTokenizer(config.data.ends_documents))
    return config


def initial_model(config: RunConfig) -> TransformerVQ:
    """Return a new model, or that of `train.init_from` with the training settings of `config`.

    Raises CheckpointError if its architecture differs from that of `config`.
    """
    source = config.train.init_from
    if source is None:
        return TransformerVQ(config.model)
    check_same_architecture(config)
    path = _existing(source)
    loaded = load_export(path) if is_export(path) else load_model(path)[0]
    with meta_device():
        model = TransformerVQ(config.model)
    model.load_state_dict(loaded.state_dict(), assign=True)
    return model


def check_same_architecture(config: RunConfig) -> None:
    """Raise CheckpointError if the model of `train.init_from` computes another function.

    The vocabulary is checked by `check_vocabulary`.
    """
    source = config.train.init_from
    if source is None:
        return
    given, wanted = asdict(initial_model_config(source)), asdict(config.model)
    ignored = TRAINING_FIELDS | {"vocab_size"}
    if differing := [n for n in wanted if n not in ignored and given[n] != wanted[n]]:
        named = ", ".join(f"model.{n} ({given[n]}, here {wanted[n]})" for n in differing)
        raise CheckpointError(
            f"--train.init-from {source}: its model differs in {named}; change these options to "
            "match"
        )


def check_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """Raise CheckpointError if the data have other tokens than the model of `train.init_from`."""
    if config.train.init_from is not None:
        _check_tokens(config, corpus.tokenizer())


def _check_tokens(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if this tokenizer of the data is not that of `train.init_from`."""
    source = str(config.train.init_from)
    path, n_tokens = _existing(source), initial_model_config(source).vocab_size
    own = None if path.is_file() else _tokenizer(path)  # a model file has no tokenizer
    if n_tokens == tokenizer.vocab_size and (own is None or own.sha256 == tokenizer.sha256):
        return
    fix = "use the tokenizer that it was trained with (--data.tokenizer)"
    has_bytes = own is None or own.sha256 is None
    if config.data.tokenizer_name == "bytes" and has_bytes and n_tokens in (256, 257):
        fix = f"use --data.{'no-' if n_tokens == 256 else ''}end-of-document"
    elif own is not None and own.sha256 == tokenizer.sha256:
        fix = (
            "its vocabulary was resized; save it again after "
            f"model.resize_token_embeddings({tokenizer.vocab_size})"
        )
    elif own is not None and own.sha256 is not None:
        fix = "leave out --data.tokenizer"
    raise CheckpointError(
        f"--train.init-from {source} has {n_tokens:,} tokens ({_name(own)}), but the data have "
        f"{tokenizer.vocab_size:,} ({_name(tokenizer)}); {fix}"
    )


def _name(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "unknown tokenizer"
    sha256 = tokenizer.sha256
    return "bytes" if sha256 is None else f"tokenizer {sha256[:12]}"


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder) if is_export(folder) else read_tokenizer(folder)


def _existing(init_from: str | os.PathLike[str]) -> Path:
    path = find_run(Path(init_from).expanduser())
    if path.is_file() or (path / CONFIG).is_file():
        return path
    what = "is not a run or exported folder (no config.json)" if path.is_dir() else "does not exist"
    raise CheckpointError(
        f"--train.init-from {init_from} {what}; give a run folder, a model file (.safetensors) or "
        "a folder written by `tvq export`"
    )


def _config_of_file(path: Path) -> ModelConfig:
    """Return the config in the metadata of a model file, without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            config = json.loads((file.metadata() or {})["config"])
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"--train.init-from {path} is not a model file; give one that TransformerVQ.save wrote"
        ) from error
    return ModelConfig.from_dict(config)
