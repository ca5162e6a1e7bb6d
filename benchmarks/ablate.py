"""Tables 1 and 2 of the paper at any size: codebook sizes, with and without the cache.

Every setting is trained with several seeds by the training loop of the library. The run folders
are kept, so an interrupted ablation can be resumed. Latency is measured separately: steps of all
settings take turns, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from common import Flat, Output, Record, config_record, main, trainer_and_batches
from measure import machine, synchronize
from transformer_vq.config import RunConfig
from transformer_vq.device import find_device
from transformer_vq.errors import UserError
from transformer_vq.plots import (
    BLUE,
    MUTED,
    VERMILION,
    new_figure,
    note,
)
from transformer_vq.presets import PRESETS
from transformer_vq.progress import info
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume
from trials import trials_of

ROUNDS = 5


def settings(base: RunConfig, codes: Sequence[int]) -> dict[str, RunConfig]:
    """Return all codebook sizes with the cache, including the base size, and the base without."""
    if base.model.attention != "vq":
        raise UserError("full attention has neither codebooks nor cache; use --model.attention vq")
    sizes = sorted({*codes, base.model.n_code})
    models = {f"codes-{n}": replace(base.model, n_code=n) for n in sizes}
    models[f"codes-{base.model.n_code}-no-cache"] = replace(base.model, compressive_cache=False)
    return {name: replace(base, model=model) for name, model in models.items()}


def record(base: RunConfig, runs: Path, variants: dict[str, RunConfig], seeds: int) -> Record:
    """Return the losses of the finished runs, and the time of a training step per setting."""
    folders = {name: [runs / f"{name}-seed-{i}" for i in range(seeds)] for name in variants}
    seconds = latencies([read_config(found[0]) for found in folders.values()])
    base_seconds = seconds[list(variants).index(f"codes-{base.model.n_code}")]
    rows: list[Record] = []
    for (name, config), step_seconds in zip(variants.items(), seconds, strict=True):
        bits = [_best_bits_per_byte(folder) for folder in folders[name]]
        rows.append(
            {
                "n_code": config.model.n_code,
                "compressive_cache": config.model.compressive_cache,
                "bits_per_byte": bits,
                "mean_bits_per_byte": mean(bits),
                "spread": stdev(bits) if seeds > 1 else None,
                "seconds_per_update": step_seconds,
                "latency": step_seconds / base_seconds,
            }
        )
    return {
        "what": "lowest validation bits per byte; time of a training step relative to the base",
        "machine": machine(find_device(base.train.device)),
        "config": config_record(base),
        "seeds": seeds,
        "ablation": rows,
    }


def latencies(configs: Sequence[RunConfig], rounds: int = ROUNDS) -> list[float]:
    """Return the seconds per training step of each config: the best of interleaved rounds."""
    pairs = [trainer_and_batches(config) for config in configs]
    best = [float("inf")] * len(pairs)
    for number in range(rounds + 1):  # the first is a warm-up
        for i, (trainer, batches) in enumerate(pairs):
            windows = [batches[step] for step in range(batches.n_spans)]
            start = time.perf_counter()
            for step, batch in enumerate(windows):
                trainer.step(batch, step, batches.starts_sequences(step))
            synchronize(trainer.device)
            seconds = (time.perf_counter() - start) / len(windows)
            best[i] = min(best[i], seconds) if number else best[i]
    return best


def table(record: Record) -> str:
    """Return two Markdown tables: codebook sizes, and the cache."""
    base: int = record["config"]["model"]["n_code"]
    rows = record["ablation"]
    by_size = [(f"{row['n_code']:,}", row) for row in rows if row["compressive_cache"]]
    by_cache = [
        ("yes" if row["compressive_cache"] else "no", row) for row in rows if row["n_code"] == base
    ]
    return "\n\n".join(
        _table(title, chosen, base, record["seeds"])
        for title, chosen in (
            ("codes", by_size),
            (f"compressive cache, {base:,} codes", by_cache),
        )
    )


def _table(title: str, rows: list[tuple[str, Record]], base: int, seeds: int) -> str:
    lines = [
        f"| {title} | validation bits per byte, mean of {seeds} seeds | standard deviation "
        f"| step time relative to {base:,} codes |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in rows:
        spread = "" if row["spread"] is None else f"{row['spread']:.4f}"
        figures = f"{row['mean_bits_per_byte']:.4f} | {spread} | {row['latency']:.3f}x"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def _best_bits_per_byte(run: Path) -> float:
    bits: list[float] = [
        row["bits_per_byte"] for row in read_metrics(run) if row["kind"] == "validation"
    ]
    return min(bits)


CODES = (8, 32, 128)


_TINY = PRESETS["tiny"]


ABLATION_BASE = replace(
    _TINY,
    model=replace(_TINY.model, block_len=16, n_code=128, ema_decay=0.95),
    train=replace(
        _TINY.train,
        batch_size=4,
        seq_len=512,
        steps=2400,
        eval_every=800,
        save_every=800,
        eval_tokens=100_000,
    ),
)
"""Sequences of 32 blocks; 5 to 7 minutes per run on two cores.

Blocks are shorter and runs are longer than in `tiny`, because long-range attention hurts early in
training. It helps only after the model has learned short-range structure.
"""


def plot_ablation(record: Record, path: Path) -> None:
    """Plot the validation loss of every seed with its mean, and the latency, by setting."""
    rows = record["ablation"]
    names = [f"{r['n_code']}\n" + ("" if r["compressive_cache"] else "no cache") for r in rows]
    with new_figure(path, columns=2) as (figure, (left, right)):
        for x, row in enumerate(rows):
            bits, mean = row["bits_per_byte"], row["mean_bits_per_byte"]
            left.plot([x] * len(bits), bits, "o", color=BLUE, ms=6, alpha=0.55, mew=0)
            left.plot([x - 0.22, x + 0.22], [mean] * 2, color=VERMILION)
        bars = right.bar(range(len(rows)), [row["latency"] for row in rows], 0.6, color=BLUE)
        right.bar_label(bars, [f"{row['latency']:.2f}x" for row in rows], padding=3, color=MUTED)
        left.set_title("Validation loss (bits per byte)")
        right.set_title(f"Step time relative to {record['config']['model']['n_code']} codes")
        right.margins(y=0.12)
        for axes in (left, right):
            axes.set_xticks(range(len(rows)), names)
            axes.set_xlabel("codebook size")
            axes.grid(visible=False, axis="x")
        note(
            figure, "Left: a dot per seed, a line for the mean. The loss axis does not start at 0."
        )


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure validation loss and step time by codebook size, with and without the cache.

    Reproduces Tables 1 and 2. Every setting is a run in its own folder. If interrupted, run the
    same command again to continue. The defaults take more than an hour on two cores.
    """

    run: Flat
    runs: Path = Path("runs/ablation")
    """Folder for the runs."""
    codes: tuple[int, ...] = CODES
    """Codebook sizes. model.n-code is always included, and is also trained without the cache."""
    seeds: int = 3
    """Runs per setting."""


def measure(options: Options) -> Record:
    """Train all settings that are not finished; return the record."""
    variants = settings(options.run, options.codes)
    for trial in trials_of(variants, options.seeds):
        info(f"{trial.variant}, seed {trial.seed}")
        if not train_or_resume(trial.config, options.runs / trial.name).finished:
            info("stopped and saved; run the same command again to continue")
            raise KeyboardInterrupt
    return record(options.run, options.runs, variants, options.seeds)


if __name__ == "__main__":
    main(Options, measure, table, plot_ablation, base=ABLATION_BASE)
