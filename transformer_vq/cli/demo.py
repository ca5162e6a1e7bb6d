"""tvq demo: text of `books`, then train `tiny`, evaluate it, generate text."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from transformer_vq.cli.arguments import parse
from transformer_vq.config import Count
from transformer_vq.presets import PRESETS

PROMPT = "import os\n\ndef "
INTRODUCTION = """\
This demo takes about three minutes on two cores:
1. It generates text with `books`, the model in the package.
2. It checks that attention in linear time equals attention in quadratic time.
3. It trains a small byte-level model on the sources of Python's standard library.
4. It evaluates the model on files that were not used for training.
5. It generates text and plots the loss.
"""
NEXT = """
Try next:
  {tvq} sample books --prompt 'Call me'  # the model in the package, another prompt
  {tvq} sample {run} --prompt 'class Stack:'  # more text, another prompt
  {tvq} eval {run} --positions  # loss by position in the context
  {tvq} info enwik8-190m  # size and cost of a model of the paper
To train on your own text: {tvq} train small --data.path YOUR-TEXTS --out YOUR-RUN"""


@dataclass(frozen=True)
class DemoOptions:
    """Generate text with the model in the package, then train `tiny` in minutes.

    The data are the sources of Python's standard library. Evaluates the model, generates text and
    plots the curves. If interrupted, run the same command again to continue.
    """

    out: Path = Path("demo")
    """Run folder."""
    steps: Count = 220
    """Training steps."""
    table: bool = False
    """Print the differences from quadratic attention for all heads and reductions."""


def run(arguments: list[str]) -> int | None:
    """Run the demo; return the exit status."""
    options = parse(DemoOptions, arguments, "demo")
    tiny = PRESETS["tiny"]
    config = replace(tiny, train=replace(tiny.train, steps=options.steps))

    from transformer_vq import demo
    from transformer_vq.device import keep_freed_memory
    from transformer_vq.plots import plot_run
    from transformer_vq.threads import share_cores
    from transformer_vq.training.evaluate import evaluate
    from transformer_vq.training.run import train_or_resume

    keep_freed_memory()
    share_cores()
    print(f"{INTRODUCTION}\n1. `books` continues 'It was':\n")
    print(demo.sample("books", "It was", 150, temperature=0.7), flush=True)
    print("\n2. Linear-time attention equals quadratic attention, up to rounding (float64):\n")
    rows = list(demo.differences())
    if options.table:
        print(demo.differences_table(rows), end="\n\n")
    print(demo.differences_line(rows), flush=True)

    folder = options.out
    print(f"\n3. Training `tiny` for {config.train.steps} steps; Ctrl-C stops and saves.")
    print(f"   The run is stored in {folder}.\n", flush=True)
    result = train_or_resume(config, folder)
    if result.stopped_by is not None:
        print(f"stopped at step {result.step} and saved; run the same command again to continue")
        return 128 + result.stopped_by

    found = evaluate(folder, protocols=["windowed"]).protocols["windowed"]
    print(f"4. Bits per byte of the test split: {found.bits_per_byte:.3f}")
    print(f"\n5. Text generated after {PROMPT!r}:\n")
    print(demo.sample(folder, PROMPT, 400))
    print("\nFigure: " + ", ".join(str(path) for path in plot_run(folder)))
    tvq = "tvq" if shutil.which("tvq") else f"{sys.executable} -m transformer_vq"
    print(NEXT.format(tvq=tvq, run=shlex.quote(str(folder))))
    return None
