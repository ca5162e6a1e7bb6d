"""tvq bench compress: bits per byte of runs, n-gram models and compressors on the same files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.cli.arguments import UsageError, check_range
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Checkpoint, Device, Json, Overwrite
from transformer_vq.cli.output import out_of_memory_advice
from transformer_vq.config import DataConfig, Precision
from transformer_vq.config.data import Format

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")]
MAX_ORDER = 32  # of n-grams; larger numbers are mistakes
PPMD_ORDERS = (2, 64)  # range that PPMd supports


@dataclass(frozen=True)
class Texts:
    """Text to measure."""

    path: tuple[str, ...] = ()
    """Files, folders or patterns such as 'books/*.txt'; each file is measured by itself."""
    format: Format = "auto"
    """Format of text files; auto recognizes it by name and content."""
    text_field: str | None = None
    """Field or column with the text; None uses "text", or the only field that holds text."""
    cache: str | None = None
    """Folder for the prepared text of runs. None uses $XDG_CACHE_HOME/transformer_vq, by default
    ~/.cache/transformer_vq."""


@dataclass(frozen=True)
class Compress:
    """Compare runs with n-gram models and compressors: bits per byte of the same files.

    N-gram models are counted on the training files and do not adapt to the measured file.
    Compressors are measured on each file alone, and primed: after the training files, in the same
    stream.
    """

    runs: Runs = ()
    """Run folders or packaged models to evaluate; without any, only the baselines are measured."""
    data: Texts = Texts()
    """Text to measure."""
    train_path: tuple[str, ...] = ()
    """Training files, folders or patterns. If omitted, n-gram models and primed compressors are
    skipped."""
    orders: tuple[int, ...] = (0, 2, 4)
    """Orders of the n-gram models: how many preceding bytes they use."""
    ppmd_orders: tuple[int, ...] = (6, 8)
    """Orders of PPMd, which needs the extra `compress`."""
    checkpoint: Checkpoint = "best"
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products of the runs."""
    device: Device = "auto"
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure bits per byte; print a table."""
    options = parse_with_output(Compress, arguments, "compress")
    if not options.data.path:
        raise UsageError("bench compress needs --data.path; give the text files to measure")
    for order in options.orders:
        check_range("--orders", order, 0, MAX_ORDER)
    for order in options.ppmd_orders:
        check_range("--ppmd-orders", order, *PPMD_ORDERS)

    from transformer_vq.bench.compress import measure, table
    from transformer_vq.device import find_device, keep_freed_memory

    keep_freed_memory()
    with out_of_memory_advice("use less text, or a smaller --ppmd-orders"):
        record = measure(
            DataConfig(**vars(options.data)),
            options.train_path,
            options.runs,
            orders=options.orders,
            ppmd_orders=options.ppmd_orders,
            checkpoint=options.checkpoint,
            precision=options.precision,
            device=find_device(options.device),
        )
    print_result(record, table(record), options.out, options.json)
