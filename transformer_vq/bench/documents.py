"""The cost of packed documents: the same step without documents, with one, and with many."""

from __future__ import annotations

from transformer_vq.bench.defaults import Shape
from transformer_vq.bench.records import StepRecord
from transformer_vq.bench.steps import Cell, shape_fields
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


def table(record: StepRecord) -> str:
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
