"""The cost of packed documents: the same step without documents, with one, and with many."""

from __future__ import annotations

from dataclasses import dataclass

import train
from common import Output, Record, main
from steps import Cell, Shape, shape_fields
from train import REPEATS
from transformer_vq.errors import UserError


def cells(shape: Shape, seq_len: int = 32_768, document_len: int = 1000) -> list[Cell]:
    """Return the same model without documents, with one document, and with many."""
    if document_len < 1:
        raise UserError(f"--document-len {document_len}: must be at least 1")
    fields = shape_fields(shape)
    return [
        Cell("shga", "vq", "auto", seq_len, document_len=n, checkpoint_activations=True, **fields)
        for n in (None, seq_len, document_len)
    ]


def table(record: Record) -> str:
    """Return a Markdown table; the last column is relative to the step without documents."""
    lines = [
        "| documents | us per token | time relative to no documents |",
        "| --- | ---: | ---: |",
    ]
    base = record["rows"][0].get("us_per_token")
    for row in record["rows"]:
        n = row["document_len"]
        what = "none" if n is None else "one" if n >= row["seq_len"] else f"of {n:,} tokens"
        if "failed" in row:
            lines.append(f"| {what} | {row['failed']} |  |")
            continue
        time = "" if base is None else f"{row['us_per_token'] / base:.2f}x"
        lines.append(f"| {what} | {row['us_per_token']:.1f} | {time} |")
    return "\n".join(lines)


DOCUMENTS_SHAPE = Shape(d_model=256, n_layer=2)


@dataclass(frozen=True, kw_only=True)
class Options(Shape, Output):
    """Measure the cost of packed documents: a training step with none, with one, and with many."""

    d_model: int = 256
    n_layer: int | None = 2
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


def measure(options: Options) -> Record:
    """Measure training steps with and without documents."""
    steps = cells(options, options.seq_len, options.document_len)
    return train.run(steps, options.repeats, options.memory_gb, options.time_limit)


if __name__ == "__main__":
    main(Options, measure, table)
