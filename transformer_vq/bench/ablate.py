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

from transformer_vq.bench.cells import machine, synchronize
from transformer_vq.bench.records import AblationRecord, AblationRow, config_record
from transformer_vq.bench.steps import trainer_and_batches
from transformer_vq.config import RunConfig
from transformer_vq.device import find_device
from transformer_vq.errors import UserError
from transformer_vq.progress import info
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume

ROUNDS = 5


@dataclass(frozen=True)
class Setting:
    """The varied fields of the model config."""

    n_code: int
    compressive_cache: bool = True

    @property
    def name(self) -> str:
        """The prefix of the run folders."""
        return f"codes-{self.n_code}" + ("" if self.compressive_cache else "-no-cache")

    def config(self, base: RunConfig, seed: int) -> RunConfig:
        """Return the config of a run with this setting."""
        model = replace(base.model, n_code=self.n_code, compressive_cache=self.compressive_cache)
        return replace(base, model=model, train=replace(base.train, seed=seed))


def settings(base: RunConfig, codes: Sequence[int]) -> list[Setting]:
    """Return all codebook sizes with the cache, including the base size, and the base without."""
    if base.model.attention != "vq":
        raise UserError("full attention has neither codebooks nor cache; use --model.attention vq")
    sizes = sorted({*codes, base.model.n_code})
    return [*(Setting(n) for n in sizes), Setting(base.model.n_code, compressive_cache=False)]


def train_all(base: RunConfig, out: Path, codes: Sequence[int], seeds: int) -> int | None:
    """Train all unfinished runs; return the number of the signal that stopped it, or None."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    todo = [(setting, seed) for seed in range(seeds) for setting in settings(base, codes)]
    configs = [setting.config(base, seed) for setting, seed in todo]  # check all of them first
    for number, ((setting, seed), config) in enumerate(zip(todo, configs, strict=True), start=1):
        info(f"[{number}/{len(todo)}] {setting.name}, seed {seed}")
        result = train_or_resume(config, _folder(out, setting, seed))
        if not result.finished:
            return result.stopped_by
    return None


def record(base: RunConfig, out: Path, codes: Sequence[int], seeds: int) -> AblationRecord:
    """Return the losses of the finished runs, and the time of a training step per setting."""
    found = settings(base, codes)
    seconds = latencies([read_config(_folder(out, setting, 0)) for setting in found])
    base_seconds = seconds[found.index(Setting(base.model.n_code))]
    rows: list[AblationRow] = []
    for setting, step_seconds in zip(found, seconds, strict=True):
        bits = [_best_bits_per_byte(_folder(out, setting, seed)) for seed in range(seeds)]
        rows.append(
            {
                "n_code": setting.n_code,
                "compressive_cache": setting.compressive_cache,
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
            windows = [batches[step] for step in range(batches.n_windows)]
            start = time.perf_counter()
            for step, batch in enumerate(windows):
                trainer.step(batch, step, batches.starts_sequences(step))
            synchronize(trainer.device)
            seconds = (time.perf_counter() - start) / len(windows)
            best[i] = min(best[i], seconds) if number else best[i]
    return best


def table(record: AblationRecord) -> str:
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


def _table(title: str, rows: list[tuple[str, AblationRow]], base: int, seeds: int) -> str:
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


def _folder(out: Path, setting: Setting, seed: int) -> Path:
    return out / f"{setting.name}-seed-{seed}"


def _best_bits_per_byte(run: Path) -> float:
    bits: list[float] = [
        row["bits_per_byte"] for row in read_metrics(run) if row["kind"] == "validation"
    ]
    return min(bits)
