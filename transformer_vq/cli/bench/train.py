"""tvq bench train: training throughput and memory by head type, kind and length."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.bench.defaults import (
    HEAD_TYPES,
    KINDS,
    LENGTHS,
    QUICK_KINDS,
    QUICK_LENGTHS,
    QUICK_REPEATS,
    REPEATS,
    TRAIN_SHAPE,
    Checkpointing,
)
from transformer_vq.bench.records import StepKind
from transformer_vq.cli.arguments import check_range
from transformer_vq.cli.bench.common import (
    MAX_REPEATS,
    FlatShape,
    Out,
    parse_with_output,
    print_result,
)
from transformer_vq.cli.options import Json, Overwrite
from transformer_vq.config import HeadType


@dataclass(frozen=True)
class Train:
    """Measure training throughput and memory by head type, kind of attention and length.

    Reproduces Tables 6-9. Every cell of the grid runs in a subprocess and times complete training
    steps: forward, backward through the entire sequence, optimizer, codebooks. All cells are
    measured once per round. Ctrl-C prints the results so far.
    """

    shape: FlatShape = TRAIN_SHAPE
    head_types: tuple[HeadType, ...] = HEAD_TYPES
    """Head types: single-head gated, multi-query, multi-head and grouped-query attention."""
    kinds: tuple[StepKind, ...] | None = None
    """full: quadratic attention as in the paper; sdpa: MHA with PyTorch's fused attention; the
    others: VQ attention with that reduction. By default all except triton, which needs a GPU."""
    lengths: tuple[int, ...] | None = None
    """Tokens per sequence; by default 2048 8192 32768 131072."""
    checkpoint_activations: Checkpointing = "auto"
    """Activation checkpointing; auto enables it in cells that are out of memory without it."""
    compile: bool = False
    """Use torch.compile."""
    repeats: int | None = None
    """Rounds; the best and the median of each cell are reported. By default 3."""
    quick: bool = False
    """Measure only full, sdpa and auto at 2048 and 8192 tokens in 2 rounds: a few minutes on two
    cores. --kinds, --lengths and --repeats take precedence."""
    memory_gb: float | None = None
    """Memory limit of a cell; by default nearly all memory."""
    time_limit: float = 300.0
    """Seconds per step; cells that would take longer are skipped, with an estimate. A cell that
    takes longer than 600 seconds and three such steps is stopped."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure a grid of training steps; print a table."""
    options = parse_with_output(Train, arguments, "train")
    check_range("--repeats", options.repeats, 1, MAX_REPEATS)

    from transformer_vq.bench.cells import Interrupted
    from transformer_vq.bench.grid import grid
    from transformer_vq.bench.train import run as measure
    from transformer_vq.bench.train import table

    kinds, lengths, repeats = KINDS, LENGTHS, REPEATS
    if options.quick:
        kinds, lengths, repeats = QUICK_KINDS, QUICK_LENGTHS, QUICK_REPEATS
    cells = grid(
        options.head_types,
        kinds if options.kinds is None else options.kinds,
        lengths if options.lengths is None else options.lengths,
        options.shape,
        options.compile,
    )
    repeats = repeats if options.repeats is None else options.repeats
    try:
        record = measure(
            cells, repeats, options.memory_gb, options.time_limit, options.checkpoint_activations
        )
    except Interrupted as stop:
        if stop.record["rows"]:
            print_result(stop.record, table(stop.record), options.out, options.json)
        raise
    print_result(record, table(record), options.out, options.json)
