"""tvq bench ablate: validation loss and step time by codebook size, and without the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.bench import defaults
from transformer_vq.cli.arguments import check_range, parse
from transformer_vq.cli.bench.common import MAX_REPEATS, preset_or, print_result
from transformer_vq.cli.options import Flat, Json


@dataclass(frozen=True)
class Ablate:
    """Measure validation loss and step time by codebook size, with and without the cache.

    Reproduces Tables 1 and 2. Every setting is a run in its own folder. If interrupted, run the
    same command again to continue. The defaults take more than an hour on two cores.
    """

    run: Flat
    out: Path = Path("runs/ablation")
    """Folder for the runs and for ablation.json, which `tvq plot` plots."""
    codes: tuple[int, ...] = defaults.CODES
    """Codebook sizes. model.n-code is always included, and is also trained without the cache."""
    seeds: int = 3
    """Runs per setting."""
    json: Json = False


def run(arguments: list[str]) -> int | None:
    """Train all settings and print tables; return the exit status."""
    base, rest = preset_or(defaults.ABLATION_BASE, arguments)
    options = parse(Ablate, rest, "bench ablate [PRESET]", Ablate(base))
    check_range("--seeds", options.seeds, 1, MAX_REPEATS)

    from transformer_vq.bench.ablate import record, table, train_all
    from transformer_vq.device import keep_freed_memory

    keep_freed_memory()
    ablation = (options.run, options.out, options.codes, options.seeds)
    stopped_by = train_all(*ablation)
    if stopped_by is not None:
        print("stopped and saved; run the same command again to continue")
        return 128 + stopped_by
    result = record(*ablation)
    print_result(result, table(result), options.out / "ablation.json", options.json)
    return None
