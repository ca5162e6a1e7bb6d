"""tvq prepare: tokenize a dataset into a corpus."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import tyro

from transformer_vq.cli.arguments import (
    HELP,
    MAX_ROWS,
    UsageError,
    as_options,
    check_range,
    first_word,
    nearest,
    parse,
)
from transformer_vq.cli.options import Json
from transformer_vq.cli.output import print_json
from transformer_vq.config import LEARNED, DataConfig, Dataset
from transformer_vq.errors import UserError
from transformer_vq.progress import info

if TYPE_CHECKING:
    from transformer_vq.data.corpus import Corpus


DATASETS: tuple[str, ...] = get_args(Dataset)


@dataclass(frozen=True)
class PrepareOptions:
    """Tokenize a dataset into a corpus; `tvq train` also does this when needed.

    enwik8 is downloaded if no path is given; nothing else is ever downloaded. An interrupted
    preparation is resumed by the same command.
    """

    data: Annotated[DataConfig, tyro.conf.arg(name="")]
    vocab_size: int | None = None
    """Size of a vocabulary that is learned; None uses 8,192."""
    json: Json = False


def run(arguments: list[str]) -> None:
    """Prepare a corpus; print its splits and their sizes."""
    hint = f"DATASET is one of {', '.join(DATASETS)}"
    hidden = ("data.dataset",)
    example = PrepareOptions(DataConfig())
    if arguments and not arguments[0].startswith("-"):
        name, rest = arguments[0], arguments[1:]
    elif HELP & set(arguments):
        name, rest = first_word(
            arguments, "prepare", "DATASET", hint, PrepareOptions, example, hidden
        )
    else:
        name, rest = "text", arguments
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}{nearest(name, DATASETS)}; {hint}")
    default = PrepareOptions(DataConfig(dataset=cast(Dataset, name)))
    try:
        options = parse(PrepareOptions, rest, f"prepare {name}", default, hidden=hidden)
        check_range("--vocab-size", options.vocab_size, 1, MAX_ROWS)
        if options.vocab_size is not None and options.data.tokenizer_name not in LEARNED:
            raise UsageError(
                "--vocab-size is for a vocabulary that is learned; use --tokenizer bpe, or leave "
                "it out"
            )
        corpus = _prepare(options)
    except KeyboardInterrupt:
        info("interrupted; run the same command again to continue")
        raise
    except UserError as error:
        # Library messages name options of `tvq train`, which have a section.
        message = as_options(str(error)).replace("--data.", "--")
        raise UserError(message.replace("--model.vocab-size", "--vocab-size")) from error
    print(corpus_table(corpus))
    print_json(corpus_record(corpus), options.json)


def _prepare(options: PrepareOptions) -> Corpus:
    from transformer_vq.data.corpora import download
    from transformer_vq.data.prepare import prepare

    data = options.data
    if data.dataset == "enwik8" and not data.path:
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
