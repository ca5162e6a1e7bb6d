"""Data configs: which files to train on, how they are split, and how text becomes tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from transformer_vq.config.checks import Range, check_fields, shown
from transformer_vq.errors import UserError

Dataset = Literal["text", "enwik8", "pg19", "imagenet64", "images"]
Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
Fraction = Annotated[float, Range(0, 1)]
BelowHalf = Annotated[float, Range(0, 0.5, below=True)]
Weight = Annotated[float, Range(0, 1e6, above=True)]

LearnedTokenizer = Literal["bpe", "sentencepiece"]
LEARNED: tuple[str, ...] = get_args(LearnedTokenizer)
"""Tokenizers that are learned from the training data."""
PATHS = ("path", "validation_path", "test_path")


@dataclass(frozen=True)
class DataConfig:
    """Training data."""

    dataset: Dataset = "text"
    """text: documents of any text format (default: the sources of Python's standard library).
    enwik8. pg19: books in PG-19's folders. imagenet64: ImageNet64 npz files. images: a folder of
    images."""
    path: tuple[str, ...] = ()
    """Files, folders or patterns such as 'data/*.jsonl.gz'; - reads standard input."""
    validation_path: tuple[str, ...] = ()
    """Text for validation. If given, no training text is used for it."""
    test_path: tuple[str, ...] = ()
    """Text for testing. If given, no training text is used for it."""
    validation_share: BelowHalf = 0.05
    """Share of the text for validation, unless --data.validation-path is given."""
    test_share: BelowHalf = 0.05
    """Share of the text for testing, unless --data.test-path is given."""
    format: Format = "auto"
    """Format of text files; auto recognizes it by name and content."""
    text_field: str | None = None
    """Field or column with the text; None uses "text", or the only field that holds text."""
    weights: tuple[Weight, ...] = ()
    """One number per --data.path: how often its sequences are trained on, relative to the others.
    If omitted, each is used in proportion to its size."""
    tokenizer: str | None = None
    """bytes; bpe or sentencepiece: a vocabulary learned from the training text; or a file or
    folder: a SentencePiece .model or a Hugging Face tokenizer. None uses bytes, and sentencepiece
    for pg19."""
    end_of_document: bool = True
    """Train on a token that ends each document, so that generation stops by itself. Text only."""
    cache: str | None = None
    """Folder for prepared corpora and downloads. None uses $XDG_CACHE_HOME/transformer_vq, by
    default ~/.cache/transformer_vq."""

    def __post_init__(self) -> None:
        for name in PATHS:
            if isinstance(path := getattr(self, name), str):  # a single path may be a string
                object.__setattr__(self, name, (path,))
        check_fields(self, "data")
        if self.weights and len(self.weights) != len(self.path):
            raise UserError(
                f"data.weights={shown(self.weights)}: {len(self.weights)} numbers for "
                f"{len(self.path)} paths; give one number per --data.path"
            )
        if self.dataset != "text":
            self._reject_text_options()

    def _reject_text_options(self) -> None:
        """Raise UserError for options that other datasets would ignore."""
        only_text = ["validation_path", "test_path", "validation_share", "test_share"]
        only_text += ["format", "text_field", "weights"]
        if self.has_images:
            only_text.append("tokenizer")
        for name in only_text:
            value = getattr(self, name)
            if value != getattr(DataConfig, name):
                raise UserError(
                    f"data.{name}={shown(value)}: data.dataset={self.dataset} does not use it; "
                    "leave it out, or use --data.dataset text"
                )
        if len(self.path) > 1:
            raise UserError(
                f"data.dataset={self.dataset} is read from one --data.path, not {len(self.path)}"
            )

    @property
    def cache_folder(self) -> str:
        """The folder for prepared corpora and downloads; it may start with `~`."""
        if self.cache is not None:
            return self.cache
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification ignores relative paths.
        return os.path.join(base if os.path.isabs(base) else "~/.cache", "transformer_vq")

    @property
    def has_images(self) -> bool:
        """Whether tokens are pixels, not text."""
        return self.dataset in ("imagenet64", "images")

    @property
    def ends_documents(self) -> bool:
        """Whether an end-of-document token follows each document."""
        return self.end_of_document and not self.has_images

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer with its default filled in: bytes, bpe, sentencepiece or a path."""
        if self.tokenizer is not None:
            return self.tokenizer
        return "sentencepiece" if self.dataset == "pg19" else "bytes"
