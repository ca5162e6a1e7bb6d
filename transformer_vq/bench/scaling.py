"""Time and memory of one training step (forward + backward) as the sequence grows.

Each length runs in a process of its own, so that peak memory is that length's alone. The figure
that travels is the ratio of times per token within one run; absolute times are the machine's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from transformer_vq.bench import run_main
from transformer_vq.config import ModelConfig
from transformer_vq.files import write_json
from transformer_vq.nn.model import TransformerVQ


@dataclass(frozen=True)
class Cell:
    """One measurement: which model, how long a sequence."""

    attention: str
    seq_len: int
    d_model: int = 256
    n_layer: int = 2
    head_type: str = "shga"
    reduction: str = "auto"
    recompute: bool = True
    repeats: int = 2
    steps: int = 1
    """Training steps in one timing: many of a short sequence, so that every timing lasts as long
    and a lucky moment of the machine does not favour the short ones."""
    document_len: int | None = None
    """Tokens per document packed into the sequence; None for the path without documents."""


def measure(cell: Cell) -> dict[str, Any]:
    """Seconds per token and peak memory of forward + backward through the whole sequence."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=256,
        d_model=cell.d_model,
        n_layer=cell.n_layer,
        head_type=cell.head_type,  # type: ignore[arg-type]
        attention=cell.attention,  # type: ignore[arg-type]
        reduction=cell.reduction,  # type: ignore[arg-type]
    )
    model = TransformerVQ(config, recompute=cell.recompute)
    tokens = torch.randint(config.vocab_size, (1, cell.seq_len + 1))
    document_ids = None
    if cell.document_len is not None:
        document_ids = torch.arange(cell.seq_len).unsqueeze(0) // cell.document_len
    seconds = []
    for _ in range(cell.repeats + 1):  # the first is a warm-up
        model.zero_grad()
        start = time.perf_counter()
        for _ in range(cell.steps):
            output = model(tokens[:, :-1], document_ids=document_ids)
            loss = F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss + config.commit_coef * output.commit_loss).backward()
            del output, loss
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return asdict(cell) | {
        "us_per_token": 1e6 * min(seconds[1:]) / (cell.steps * cell.seq_len),
        "peak_gb": peak / 1e9,
    }


def run(cells: list[Cell], rounds: int = 2) -> dict[str, Any]:
    """Measure each cell in a fresh process, telling on stderr how far it is.

    All cells are measured once per round and the best of a cell counts, so that a slow minute of a
    shared machine does not fall on one length alone.
    """
    best: dict[Cell, dict[str, Any]] = {}
    total = rounds * len(cells)
    for number, cell in enumerate(cells * rounds, start=1):
        what = "" if cell.document_len is None else f" in documents of {cell.document_len:,}"
        print(f"[{number}/{total}] {cell.attention} {cell.seq_len:,} tokens{what}", file=sys.stderr)
        command = [sys.executable, "-m", "transformer_vq.bench.scaling"]
        command += ["--cell", json.dumps(asdict(cell))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            row = asdict(cell) | {"failed": f"exit status {done.returncode}"}
        else:
            row = json.loads(done.stdout.splitlines()[-1])
        best[cell] = min(best.get(cell, row), row, key=lambda r: r.get("us_per_token", math.inf))
    rows = list(best.values())
    return {
        "what": "forward + backward of one sequence, float32, batch 1",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "torch": torch.__version__,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table; the last column is the time per token relative to VQ at 8,192 tokens."""
    rows = [row for row in result["rows"] if "failed" not in row]
    base = next(
        (r["us_per_token"] for r in rows if (r["attention"], r["seq_len"]) == ("vq", 8192)),
        rows[0]["us_per_token"],
    )
    lines = [
        "| attention | tokens | us per token | peak GB | time per token, VQ at 8,192 = 1 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['attention']} | {row['seq_len']:,} | {row['us_per_token']:.1f} "
            f"| {row['peak_gb']:.2f} | {row['us_per_token'] / base:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.scaling", description=__doc__
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[2048, 8192, 32768, 131072],
        help="sequence lengths for VQ attention",
    )
    parser.add_argument(
        "--full-lengths",
        type=int,
        nargs="*",
        default=[2048, 4096, 8192],
        help="sequence lengths for the full-attention baseline, whose cost is quadratic",
    )
    parser.add_argument("--head-type", default="shga", choices=["shga", "mqa", "mha"])
    parser.add_argument("--repeats", type=int, default=1, help="timings per round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the best timing counts")
    parser.add_argument("--out", type=Path, help="write the measurements to this JSON file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        print(json.dumps(measure(Cell(**json.loads(options.cell)))))
        return
    common = {"head_type": options.head_type, "repeats": options.repeats}
    longest = max(options.lengths)
    cells = [Cell("vq", n, steps=max(1, longest // n), **common) for n in options.lengths]
    cells += [Cell("full", n, **common) for n in options.full_lengths]
    result = run(cells, options.rounds)
    if options.out:
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    run_main(main)
