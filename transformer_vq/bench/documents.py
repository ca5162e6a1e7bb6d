"""What packed documents cost: the same step without documents, with one, and with many."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformer_vq.bench import run_main
from transformer_vq.bench.scaling import Cell, run
from transformer_vq.files import write_json


def table(result: dict[str, Any]) -> str:
    """A Markdown table; the last column is the time relative to the path without documents."""
    rows = result["rows"]
    base = next(row["us_per_token"] for row in rows if row["document_len"] is None)
    lines = ["| documents | us per token | time, without = 1 |", "| --- | ---: | ---: |"]
    for row in rows:
        n = row["document_len"]
        what = "none" if n is None else "one" if n >= row["seq_len"] else f"of {n:,} tokens"
        lines.append(f"| {what} | {row['us_per_token']:.1f} | {row['us_per_token'] / base:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.documents", description=__doc__
    )
    parser.add_argument("--seq-len", type=int, default=32768, help="tokens in the sequence")
    parser.add_argument("--document-len", type=int, default=1000, help="tokens per document")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best step counts")
    parser.add_argument("--out", type=Path, help="write the measurements to this JSON file")
    options = parser.parse_args()
    lengths = (None, options.seq_len, options.document_len)
    cells = [Cell("vq", options.seq_len, document_len=n) for n in lengths]
    result = run(cells, options.rounds)
    if options.out:
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    run_main(main)
