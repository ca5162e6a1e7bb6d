"""tvq bench documents: the cost of packed documents in training."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.bench.defaults import DOCUMENTS_SHAPE, REPEATS
from transformer_vq.cli.arguments import check_range
from transformer_vq.cli.bench.common import (
    MAX_REPEATS,
    MAX_TOKENS,
    FlatShape,
    Out,
    parse_with_output,
    print_result,
)
from transformer_vq.cli.options import Json, Overwrite


@dataclass(frozen=True)
class Documents:
    """Measure the cost of packed documents: a training step with none, with one, and with many."""

    shape: FlatShape = DOCUMENTS_SHAPE
    seq_len: int = 32768
    """Tokens per sequence."""
    document_len: int = 1000
    """Tokens per document, for the step with many documents."""
    repeats: int = REPEATS
    """Rounds; the best one counts."""
    memory_gb: float | None = None
    """Memory limit of a measurement; by default nearly all memory."""
    time_limit: float = 300.0
    """Seconds per step. A measurement that takes longer than 600 seconds and three such steps is
    stopped and reported as failed."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure training steps with and without documents; print a table."""
    options = parse_with_output(Documents, arguments, "documents")
    check_range("--repeats", options.repeats, 1, MAX_REPEATS)
    check_range("--document-len", options.document_len, 1, MAX_TOKENS)

    from transformer_vq.bench import documents, train

    cells = documents.cells(options.shape, options.seq_len, options.document_len)
    record = train.run(cells, options.repeats, options.memory_gb, options.time_limit)
    print_result(record, documents.table(record), options.out, options.json)
