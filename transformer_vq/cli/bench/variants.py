"""tvq bench variants: train variants of a config with several seeds and compare them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import check_range, parse
from transformer_vq.cli.bench.common import MAX_REPEATS, MAX_TOKENS, preset_or, print_trials
from transformer_vq.cli.options import Flat, Json
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class Variants:
    """Train variants of a preset with several seeds; compare their bits per byte.

    By default these are VQ attention, full attention, and a window without the cache. Every trial
    is a run in its own folder. If interrupted, run the same command again to continue.
    """

    run: Flat
    variants: tuple[str, ...] = (
        "vq",
        "full:model.attention=full",
        "window:model.compressive-cache=false",
    )
    """NAME, or NAME:SECTION.FIELD=VALUE,...; the others are compared to the first."""
    seeds: int = 3
    """Runs per variant."""
    position_len: int | None = None
    """Length of the contexts in which the loss by position is measured; None uses train.seq-len."""
    jobs: int = 1
    """Number of runs at the same time; each gets its share of the cores."""
    runs: Path = Path("runs/variants")
    """Folder for the runs."""
    out: Path | None = None
    """JSON file for the results, which `tvq plot` plots. Trials that it contains are not repeated.
    None writes variants.json into the folder of the runs."""
    json: Json = False


def run(arguments: list[str]) -> int | None:
    """Train all variants and print a table; return the exit status."""
    base, rest = preset_or(PRESETS["tiny"], arguments)
    options = parse(Variants, rest, "bench variants [PRESET]", Variants(base))
    check_range("--seeds", options.seeds, 1, MAX_REPEATS)
    check_range("--jobs", options.jobs, 1, MAX_REPEATS)
    check_range("--position-len", options.position_len, 1, MAX_TOKENS)

    from transformer_vq.bench.trials import run_grid, trials_of
    from transformer_vq.bench.variants import record, table, variants_of

    variants = variants_of(options.run, options.variants)
    trials = trials_of(variants, options.seeds, options.position_len)
    out = options.out or options.runs / "variants.json"
    rows, stopped = run_grid(trials, options.runs, out, options.jobs, record)
    return print_trials(record(rows), table(record(rows)), stopped, options.json)
