"""tvq prepare: tokenize a dataset into a corpus."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.cli.arguments import Json, parse
from transformer_vq.cli.output import as_options, print_json
from transformer_vq.config import LEARNED, DataConfig, Dataset, Rows
from transformer_vq.errors import UserError


@dataclass(frozen=True)
class PrepareOptions:
    """Tokenize a dataset into a corpus; `tvq train` also does this when needed.

    enwik8 is downloaded if no path is given; nothing else is ever downloaded. An interrupted
    preparation is resumed by the same command.
    """

    data: Annotated[DataConfig, tyro.conf.arg(name="")]
    dataset: tyro.conf.Positional[Dataset] = "text"
    """Kind of data."""
    vocab_size: Rows | None = None
    """Size of a vocabulary that is learned; None uses 8,192."""
    json: Json = False


def run(arguments: list[str]) -> None:
    """Prepare a corpus; print its splits and their sizes."""
    default = PrepareOptions(DataConfig())
    try:
        options = parse(PrepareOptions, arguments, "prepare", default, hidden=["data.dataset"])
        data = replace(options.data, dataset=options.dataset)
        if options.vocab_size is not None and data.tokenizer_name not in LEARNED:
            raise UserError("--vocab-size is for a vocabulary that is learned: --tokenizer bpe")

        from transformer_vq.data.corpora import download
        from transformer_vq.data.prepare import prepare

        if data.dataset == "enwik8" and not data.path:
            download(Path(os.path.expanduser(data.cache_folder)))
        corpus = prepare(data, options.vocab_size)
    except UserError as error:
        # Library messages name options of `tvq train`, which have a section.
        message = as_options(str(error)).replace("--data.", "--")
        raise UserError(message.replace("--model.vocab-size", "--vocab-size")) from error
    print(f"{corpus.dataset} in {corpus.folder}, vocabulary of {corpus.vocab_size:,}")
    splits = {name: vars(size) for name, size in corpus.sizes.items()}
    for name, size in splits.items():
        counts = [f"{n:,} {what}" for what, n in size.items() if n is not None]
        print(f"{name:>10}: {', '.join(counts)}")
    record = {"dataset": corpus.dataset, "folder": str(corpus.folder)}
    print_json(record | {"vocab_size": corpus.vocab_size, "splits": splits}, options.json)
