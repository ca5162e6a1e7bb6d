"""tvq bench tokenize: throughput and memory of preparing text."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.cli.arguments import MAX_ROWS, UsageError, check_range
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Json, Overwrite
from transformer_vq.config import DataConfig
from transformer_vq.config.data import LearnedTokenizer


@dataclass(frozen=True)
class Tokenize:
    """Measure the preparation of text next to the tokenizer library alone, and its peak memory.

    A vocabulary is learned from the text. Then copies of the text are prepared.
    """

    path: tuple[str, ...] = ()
    """Text files, folders or patterns; by default the sources of Python's standard library."""
    tokenizer: LearnedTokenizer = "bpe"
    """Tokenizer to learn."""
    vocab_size: int = 8192
    """Size of its vocabulary."""
    megabytes: tuple[int, ...] = (20, 200)
    """Sizes of the text to prepare; the text is repeated to reach them."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure throughput and memory; print a table."""
    options = parse_with_output(Tokenize, arguments, "tokenize")
    check_range("--vocab-size", options.vocab_size, 1, MAX_ROWS)
    if not options.megabytes:
        raise UsageError("--megabytes: give at least one size")
    for n in options.megabytes:
        check_range("--megabytes", n, 1, 10**6)

    from transformer_vq.bench import tokenize

    config = DataConfig(path=options.path, tokenizer=options.tokenizer)
    record = tokenize.run(config, options.vocab_size, options.megabytes)
    print_result(record, tokenize.table(record), options.out, options.json)
