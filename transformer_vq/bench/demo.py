"""What `make demo` shows: the equality with the definition, and how time grows with length."""

from __future__ import annotations

import json
from pathlib import Path

from transformer_vq.bench import run_main
from transformer_vq.bench.equality import differences
from transformer_vq.bench.plots import plot_scaling
from transformer_vq.bench.scaling import Cell, run, table


def main() -> None:
    print("1. The same result as attention over all quantized keys (float64, 1,000 tokens).")
    print("   Relative RMS difference to Definition 3.1 computed in quadratic time:\n")
    print("| heads | reduction | output | gradients |\n| --- | --- | ---: | ---: |")
    for head_type, reduction, output, gradients in differences():
        print(f"| {head_type} | {reduction} | {output:.1e} | {gradients:.1e} |", flush=True)

    print("\n2. In linear time: one training step, forward and backward through the sequence.\n")
    cells = [Cell("vq", n, repeats=3) for n in (1024, 2048, 4096, 8192, 16384)]
    cells += [Cell("full", n, repeats=3) for n in (1024, 2048, 4096, 8192)]
    result = run(cells, rounds=1)
    print(table(result))
    folder = Path("demo")
    plot_scaling(result, folder / "scaling.png")
    (folder / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nFigure: {folder / 'scaling.png'}, measurements: {folder / 'scaling.json'}")


if __name__ == "__main__":
    run_main(main)
