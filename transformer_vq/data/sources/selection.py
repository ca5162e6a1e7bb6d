"""The choice of a data source by the data section of a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from transformer_vq.config import DataConfig
from transformer_vq.config.data import LEARNED, LearnedTokenizer
from transformer_vq.data.sources.base import SPLITS, DataError, Source
from transformer_vq.data.sources.enwik8 import EDGES, SIZE, enwik8_file
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.images import ImageFolder
from transformer_vq.data.sources.inputs import Input, find_inputs, saved_splits
from transformer_vq.data.sources.paths import check_folder, expand_user, list_files
from transformer_vq.data.sources.text import Group, TextSource, python_sources
from transformer_vq.data.tokenizers import ByteTokenizer, open_tokenizer

DEFAULT_VOCAB_SIZES = {"bpe": 8_192, "sentencepiece": 32_000}


def source_from_config(config: DataConfig, vocab_size: int | None) -> Source:
    """Return the source that a config names.

    vocab_size: of a vocabulary that must be learned; None uses the default of its kind.
    """
    if config.dataset == "text":
        groups, shares = _text_groups(config)
        source = _text_source(config, groups, vocab_size)
        return replace(source, text_field=config.text_field, shares=shares)
    path = expand_user(config.path[0], "--data.path") if config.path else None
    if config.dataset == "enwik8":
        file, size = enwik8_file(path, expand_user(config.cache_folder, "--data.cache"))
        source = _text_source(config, [Group((Input(file, "text"),))], vocab_size)
        return replace(source, edges=EDGES) if size == SIZE else source
    if path is None:
        raise DataError(
            f"{config.dataset} is not downloaded automatically; give its folder as --data.path"
        )
    if config.dataset == "pg19":
        return replace(_text_source(config, _books(path), vocab_size), replace_crlf=True)
    if config.dataset == "imagenet64":
        return ImageNet64.from_folder(path)
    return ImageFolder.from_folder(path)


def _text_source(config: DataConfig, groups: list[Group], vocab_size: int | None) -> TextSource:
    name, ends = config.tokenizer_name, config.ends_documents
    if name in LEARNED:
        size = vocab_size or DEFAULT_VOCAB_SIZES[name]
        learned = cast(LearnedTokenizer, name)
        return TextSource(groups, size, None, learned=learned, ends_documents=ends)
    if name == "bytes":
        tokenizer = ByteTokenizer(ends)
        return TextSource(groups, tokenizer.vocab_size, tokenizer, ends_documents=ends)
    given = open_tokenizer(expand_user(name, "--data.tokenizer"), ends)
    return TextSource(groups, given.vocab_size, given, ends_documents=ends)


def _text_groups(config: DataConfig) -> tuple[list[Group], tuple[float, float]]:
    """Return the files of each split and part, and the shares of validation and test.

    A share is 0 if a split has files of its own.
    """
    if config.path:
        groups = _given_groups(config)
    else:
        groups = [Group(tuple(Input(file, "text") for file in python_sources()))]
    for split in SPLITS[1:]:
        if paths := getattr(config, f"{split}_path"):
            option = f"--data.{split}-path"
            groups.append(Group(tuple(find_inputs(paths, config.format, option)), split))
    given = {group.split for group in groups}
    validation, test = (
        0.0 if split in given else getattr(config, f"{split}_share") for split in SPLITS[1:]
    )
    return groups, (validation, test)


def _given_groups(config: DataConfig) -> list[Group]:
    """Return the files of --data.path; with weights, each path is a part."""
    by_part = [(path,) for path in config.path] if config.weights else [config.path]
    groups: list[Group] = []
    for part, paths in enumerate(by_part):
        plain = []
        for path in paths:
            splits = saved_splits(expand_user(path, "--data.path"))
            if splits is None:
                plain.append(path)
                continue
            for split, folder in splits.items():
                # Documents of "train" are divided by share if other splits are missing.
                name = None if split == "train" else split
                groups.append(Group(tuple(find_inputs([str(folder)])), name, part))
        if plain:
            groups.append(Group(tuple(find_inputs(plain, config.format)), None, part))
    return groups


def _books(root: Path) -> list[Group]:
    """Return the books in the folder structure of PG-19: <split>/<id>.txt."""
    fix = "--data.path must contain the books as train/, validation/ and test/<id>.txt"
    check_folder(root, fix)
    groups = []
    for split in SPLITS:
        check_folder(root / split, fix)
        found = list_files(root / split, recursive=False, wanted=lambda x: x.endswith(".txt"))
        if not found:
            raise DataError(f"{root / split} contains no books; {fix}")
        groups.append(Group(tuple(Input(file, "text") for file in sorted(found)), split))
    return groups
