"""What packed documents cost: the same step without documents, with one, and with many."""

from __future__ import annotations

from typing import Any

from transformer_vq.bench.steps import Cell
from transformer_vq.errors import UserError


def cells(seq_len: int = 32_768, document_len: int = 1000, **shape: Any) -> list[Cell]:
    """The same model three times; shape: other fields of a cell."""
    if document_len < 1:
        raise UserError(f"--document-len {document_len}: must be at least 1")
    return [
        Cell("shga", "vq", "auto", seq_len, document_len=n, checkpoint_activations=True, **shape)
        for n in (None, seq_len, document_len)
    ]


def table(result: dict[str, Any]) -> str:
    """A Markdown table; the last column is the time relative to the path without documents."""
    lines = ["| documents | us per token | time, without = 1 |", "| --- | ---: | ---: |"]
    base = result["rows"][0].get("us_per_token")
    for row in result["rows"]:
        n = row["document_len"]
        what = "none" if n is None else "one" if n >= row["seq_len"] else f"of {n:,} tokens"
        if "failed" in row:
            lines.append(f"| {what} | {row['failed']} |  |")
            continue
        time = "" if base is None else f"{row['us_per_token'] / base:.2f}"
        lines.append(f"| {what} | {row['us_per_token']:.1f} | {time} |")
    return "\n".join(lines)
