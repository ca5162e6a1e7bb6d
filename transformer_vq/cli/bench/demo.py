"""tvq bench demo: train `tiny`, compare it with n-gram models, and generate text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformer_vq.cli.arguments import check_range, parse
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class Demo:
    """Train `tiny` on the sources of Python's standard library, in minutes.

    Compares the model with n-gram models, generates text and plots the curves. If interrupted, run
    the same command again to continue.
    """

    out: Path = Path("demo")
    """Run folder."""
    steps: int | None = None
    """Training steps; by default those of the preset."""


def run(arguments: list[str]) -> int | None:
    """Run the demo; return the exit status."""
    options = parse(Demo, arguments, "bench demo")
    check_range("--steps", options.steps, 1)
    config = PRESETS["tiny"]
    if options.steps is not None:
        config = replace(config, train=replace(config.train, steps=options.steps))

    from transformer_vq.bench.demo import measure, table
    from transformer_vq.bench.equality import differences
    from transformer_vq.bench.plots import plot_path
    from transformer_vq.device import keep_freed_memory
    from transformer_vq.files import write_json
    from transformer_vq.training.run import train_or_resume

    keep_freed_memory()
    print("1. Linear-time attention equals quadratic attention, up to rounding (float64).")
    print("   Relative RMS difference from Definition 3.1, 1,000 tokens:\n")
    print("| heads | reduction | output | gradients |\n| --- | --- | ---: | ---: |")
    for head_type, reduction, output, gradients in differences():
        print(f"| {head_type} | {reduction} | {output:.1e} | {gradients:.1e} |", flush=True)

    folder = options.out
    print("\n2. Training `tiny` on the sources of Python's standard library.\n", flush=True)
    result = train_or_resume(config, folder)
    if result.stopped_by is not None:
        print(f"stopped at step {result.step} and saved; run the same command again to continue")
        return 128 + result.stopped_by

    print("3. Bits per byte of the test split, compared with n-gram models:\n")
    record = measure(folder)
    write_json(folder / "demo.json", record)
    print(table(record))
    print("\n4. Text generated after `import os` and `def`:\n")
    print(record["sample"])
    print("\nFigures: " + ", ".join(str(path) for path in plot_path(folder)))
    print(f"Next: tvq eval {folder}; tvq train small --data.path YOUR.txt --out YOUR-RUN")
    return None
