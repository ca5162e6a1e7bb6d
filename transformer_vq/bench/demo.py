"""What `make demo` shows: a model trained in minutes, measured against counting, and its text.

    python -m transformer_vq.bench.demo [--out demo] [--steps N]

It learns the sources of Python's standard library. Interrupted, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_vq.bench import run_main
from transformer_vq.bench.equality import differences
from transformer_vq.bench.ngram import bits_per_byte
from transformer_vq.bench.plots import plot_path
from transformer_vq.data.corpus import prepare
from transformer_vq.data.tokenizers import load_tokenizer
from transformer_vq.files import write_json
from transformer_vq.generation.decode import generate
from transformer_vq.presets import PRESETS
from transformer_vq.training.checkpoint import load_model, read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import resume, train

PROMPT = "import os\n\ndef "


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the run")
    parser.add_argument("--steps", type=int, help="updates, instead of the preset's")
    options = parser.parse_args(arguments)

    print("1. Attention in linear time is the definition, to the last decimals (float64).")
    print("   Relative RMS difference to Definition 3.1 in quadratic time, 1,000 tokens:\n")
    print("| heads | reduction | output | gradients |\n| --- | --- | ---: | ---: |")
    for head_type, reduction, output, gradients in differences():
        print(f"| {head_type} | {reduction} | {output:.1e} | {gradients:.1e} |", flush=True)

    config = PRESETS["tiny"]
    if options.steps is not None:
        config = replace(config, train=replace(config.train, steps=options.steps))
    run = options.out
    print("\n2. Training `tiny` on the sources of Python's standard library.\n", flush=True)
    result = resume(run) if (run / "config.json").exists() else train(config, run)
    if not result.finished:
        print(f"stopped at update {result.step} and saved; `make demo` goes on from there")
        return

    print("3. Bits per byte of the test split, beside models that only count bytes:\n")
    figures = _measure(run)
    write_json(run / "demo.json", figures)
    print(table(figures))
    print("\n4. What it writes after `import os` and `def`:\n")
    print(figures["sample"])
    print("\nFigures: " + ", ".join(str(path) for path in plot_path(run)))
    print(f"More: tvq eval {run}; tvq train small --data.path YOUR.txt --out YOUR-RUN")


def table(figures: dict[str, Any]) -> str:
    """Bits per byte of three models as Markdown."""
    return "\n".join(
        [
            "| model | test bits per byte |",
            "| --- | ---: |",
            f"| order 0: frequencies of bytes | {figures['order_0']:.3f} |",
            f"| order 2: given the two bytes before | {figures['order_2']:.3f} |",
            f"| Transformer-VQ, `tiny` | {figures['tiny']:.3f} |",
        ]
    )


def _measure(run: Path) -> dict[str, Any]:
    """The test split by three models, and a sample of text."""
    config = read_config(run)
    windowed = evaluate(run, protocols=["windowed"]).protocols["windowed"]
    counting = bits_per_byte(prepare(config.data))
    model, _ = load_model(run)
    tokenizer = load_tokenizer(run)
    prompt = [tokenizer.bos, *tokenizer.encode(PROMPT)]
    tokens = generate(model, prompt, 400, top_p=0.95, seed=1)
    return {
        "order_0": counting[0],
        "order_2": counting[2],
        "tiny": windowed.bits_per_byte,
        "sample": PROMPT + tokenizer.decode(tokens).decode(errors="replace"),
    }


if __name__ == "__main__":
    run_main(main)
