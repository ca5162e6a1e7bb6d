"""tvq prepare: tokenize a dataset into a corpus."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from transformer_vq.cli.arguments import MAX_ROWS, UsageError, as_options, check_range, parse
from transformer_vq.cli.options import Json
from transformer_vq.cli.output import print_json
from transformer_vq.config import DataConfig, Dataset
from transformer_vq.errors import UserError

if TYPE_CHECKING:
    from transformer_vq.data.corpus import Corpus


@dataclass(frozen=True)
class PrepareOptions:
    """Tokenize a dataset into a corpus; `tvq train` also does this when needed.

    enwik8 is downloaded if no path is given; nothing else is ever downloaded.
    """

    dataset: tyro.conf.Positional[Dataset] = "text"
    """Format of the data."""
    path: str | None = None
    """File or folder with the data."""
    tokenizer: str | None = None
    """SentencePiece .model for books; if omitted, a vocabulary is learned from the data."""
    vocab_size: int | None = None
    """Size of the vocabulary learned for books; None uses 32,000."""
    cache: str | None = None
    """Folder for prepared corpora and downloads. None uses $XDG_CACHE_HOME/transformer_vq, by
    default ~/.cache/transformer_vq."""
    json: Json = False


def run(arguments: list[str]) -> None:
    """Prepare a corpus; print its splits and their sizes."""
    options = parse(PrepareOptions, arguments, "prepare")
    check_range("--vocab-size", options.vocab_size, 1, MAX_ROWS)
    if options.vocab_size is not None and options.dataset != "pg19":
        raise UsageError(f"--vocab-size: {options.dataset} has its own tokens; leave it out")
    try:
        corpus = _prepare(options)
    except UserError as error:
        # Library messages name options of `tvq train`, which have a section.
        message = as_options(str(error)).replace("--data.", "--")
        raise UserError(message.replace("--model.vocab-size", "--vocab-size")) from error
    print(corpus_table(corpus))
    print_json(corpus_record(corpus), options.json)


def _prepare(options: PrepareOptions) -> Corpus:
    path = () if options.path is None else (options.path,)
    data = DataConfig(options.dataset, path, tokenizer=options.tokenizer, cache=options.cache)

    from transformer_vq.data.corpus import prepare
    from transformer_vq.data.sources.enwik8 import download

    if options.dataset == "enwik8" and options.path is None:
        cache = os.path.expanduser(data.cache_folder)
        if cache.startswith("~"):
            raise UsageError(f"--cache {cache}: home folder not found; give a full path")
        download(Path(cache))
    return prepare(data, options.vocab_size)


def corpus_table(corpus: Corpus) -> str:
    """Return the splits of a corpus and their sizes, as text."""
    lines = [f"{corpus.dataset} in {corpus.folder}, vocabulary of {corpus.vocab_size:,}"]
    for name, size in corpus.sizes.items():
        words = "" if size.words is None else f", {size.words:,} words"
        lines.append(
            f"{name:>10}: {size.tokens:,} tokens, {size.documents:,} documents, "
            f"{size.bytes:,} bytes{words}"
        )
    return "\n".join(lines)


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Return the splits of a corpus and their sizes, as plain values for JSON."""
    return {
        "dataset": corpus.dataset,
        "folder": str(corpus.folder),
        "vocab_size": corpus.vocab_size,
        "splits": {name: vars(size) for name, size in corpus.sizes.items()},
    }
