"""The choice of a data source by the data section of a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformer_vq.config import DataConfig
from transformer_vq.data.sources.base import DataError, Source
from transformer_vq.data.sources.books import Books
from transformer_vq.data.sources.enwik8 import enwik8_source
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.images import ImageFolder
from transformer_vq.data.sources.text import ByteFiles, python_sources, text_files


def source_from_config(config: DataConfig, vocab_size: int) -> Source:
    """Return the source that a config names. vocab_size: of a vocabulary that must be trained."""
    path = expand_user(config.path[0], "--data.path") if config.path else None
    if config.dataset == "text":
        root, files = python_sources() if path is None else (path, text_files(path))
        return replace(ByteFiles.from_files(root, files), vocab_size=256 + config.end_of_document)
    if config.dataset == "enwik8":
        return enwik8_source(path, expand_user(config.cache_folder, "--data.cache"))
    if path is None:
        raise DataError(
            f"{config.dataset} is not downloaded automatically; give its folder as --data.path"
        )
    if config.dataset == "pg19":
        tokenizer = config.tokenizer
        model = None if tokenizer is None else expand_user(tokenizer, "--data.tokenizer")
        return Books.from_folder(path, vocab_size, model)
    if config.dataset == "imagenet64":
        return ImageNet64.from_folder(path)
    return ImageFolder.from_folder(path)


def expand_user(path: str, option: str) -> Path:
    """Return a path with `~` expanded. option: the option that gave it, for the message."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{option} {path}: unknown home folder; give a full path") from error
