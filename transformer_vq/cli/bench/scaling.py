"""tvq bench scaling: bits per byte by codebook size and by model size, with fitted power laws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import check_range, parse
from transformer_vq.cli.bench.common import MAX_REPEATS, preset_or, print_trials
from transformer_vq.cli.options import Flat, Json
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class Scaling:
    """Train a preset with several codebook sizes and model sizes; fit power laws to the loss.

    Every trial is a run in its own folder. If interrupted, run the same command again to continue.
    """

    run: Flat
    codes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Codebook sizes of the first grid."""
    sizes: tuple[str, ...] = ("64x2", "128x2", "256x2")
    """Model sizes of the second grid, as d_model x n_layer."""
    seeds: int = 3
    """Runs per codebook size and per model size."""
    jobs: int = 1
    """Number of runs at the same time; each gets its share of the cores."""
    runs: Path = Path("runs/scaling")
    """Folder for the runs."""
    out: Path | None = None
    """JSON file for the results, which `tvq plot` plots. Trials that it contains are not repeated.
    None writes scaling.json into the folder of the runs."""
    json: Json = False


def run(arguments: list[str]) -> int | None:
    """Train both grids and print tables; return the exit status."""
    base, rest = preset_or(PRESETS["tiny"], arguments)
    options = parse(Scaling, rest, "bench scaling [PRESET]", Scaling(base))
    check_range("--seeds", options.seeds, 1, MAX_REPEATS)
    check_range("--jobs", options.jobs, 1, MAX_REPEATS)

    from transformer_vq.bench.scaling import code_variants, record, size_variants, table
    from transformer_vq.bench.trials import run_grid, trials_of

    variants = code_variants(options.run, options.codes)
    variants |= size_variants(options.run, options.sizes)
    trials = trials_of(variants, options.seeds)
    out = options.out or options.runs / "scaling.json"
    rows, stopped = run_grid(trials, options.runs, out, options.jobs, record)
    return print_trials(record(rows), table(record(rows)), stopped, options.json)
