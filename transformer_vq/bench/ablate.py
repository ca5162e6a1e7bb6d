"""Tables 1 and 2 of the paper at a size of one's own: codebook sizes, with and without the cache.

Every setting is trained with several seeds by the library's own loop, in run folders that an
interrupted ablation finds again. Latency is measured apart from the trainings, updates of all
settings taking turns, so that it does not depend on what else the machine did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from transformer_vq.bench.cells import machine, synchronize
from transformer_vq.bench.steps import trainer_and_batches
from transformer_vq.config import RunConfig
from transformer_vq.device import find_device
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS
from transformer_vq.progress import info
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume

_TINY = PRESETS["tiny"]

BASE = replace(
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
"""Five to seven minutes per training on two cores; sequences of 32 times what the window holds.

Smaller windows and more updates than elsewhere: at first attention to everything is a burden, and
only a model that has learned what is near gains from what is far."""
CODES = (8, 32, 128)
ROUNDS = 5


@dataclass(frozen=True)
class Setting:
    """What is varied."""

    n_code: int
    compressive_cache: bool = True

    @property
    def name(self) -> str:
        return f"codes-{self.n_code}" + ("" if self.compressive_cache else "-no-cache")

    def config(self, base: RunConfig, seed: int) -> RunConfig:
        model = replace(base.model, **asdict(self))
        return replace(base, model=model, train=replace(base.train, seed=seed))


def settings(base: RunConfig, codes: Sequence[int]) -> list[Setting]:
    """All codebook sizes with the cache, that of the base among them, and the base without."""
    if base.model.attention != "vq":
        raise UserError("full attention has neither codebooks nor cache: use --model.attention vq")
    sizes = sorted({*codes, base.model.n_code})
    return [*(Setting(n) for n in sizes), Setting(base.model.n_code, compressive_cache=False)]


def train_all(base: RunConfig, out: Path, codes: Sequence[int], seeds: int) -> int | None:
    """Train what is not trained yet; the number of the signal that stopped it, if one did."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    todo = [(setting, seed) for seed in range(seeds) for setting in settings(base, codes)]
    configs = [setting.config(base, seed) for setting, seed in todo]  # checked before any begins
    for number, ((setting, seed), config) in enumerate(zip(todo, configs, strict=True), start=1):
        info(f"[{number}/{len(todo)}] {setting.name}, seed {seed}")
        result = train_or_resume(config, _folder(out, setting, seed))
        if not result.finished:
            return result.stopped_by
    return None


def record(base: RunConfig, out: Path, codes: Sequence[int], seeds: int) -> dict[str, Any]:
    """What the finished trainings reach, and how long an update of each setting takes."""
    found = settings(base, codes)
    seconds = latencies([read_config(_folder(out, setting, 0)) for setting in found])
    base_seconds = seconds[found.index(Setting(base.model.n_code))]
    rows = []
    for setting, of_update in zip(found, seconds, strict=True):
        bits = [_best_bits_per_byte(_folder(out, setting, seed)) for seed in range(seeds)]
        rows.append(
            asdict(setting)
            | {
                "bits_per_byte": bits,
                "mean_bits_per_byte": mean(bits),
                "spread": stdev(bits) if seeds > 1 else None,
                "seconds_per_update": of_update,
                "latency": of_update / base_seconds,
            }
        )
    config = base.to_dict()
    config["data"] = {"dataset": config["data"]["dataset"]}  # paths are nobody's business
    return {
        "what": "lowest validation bits per byte; time of an update, the base being 1",
        "machine": machine(find_device(base.train.device)),
        "config": config,
        "seeds": seeds,
        "ablation": rows,
    }


def latencies(configs: Sequence[RunConfig], rounds: int = ROUNDS) -> list[float]:
    """Seconds per update of each, the best of some rounds in which they take turns."""
    pairs = [trainer_and_batches(config) for config in configs]
    best = [float("inf")] * len(pairs)
    for number in range(rounds + 1):  # the first is a warm-up
        for i, (trainer, batches) in enumerate(pairs):
            windows = [batches[step] for step in range(batches.n_windows)]
            start = time.perf_counter()
            for step, batch in enumerate(windows):
                trainer.update(batch, step, batches.begins(step))
            synchronize(trainer.device)
            seconds = (time.perf_counter() - start) / len(windows)
            best[i] = min(best[i], seconds) if number else best[i]
    return best


def table(result: dict[str, Any]) -> str:
    """Two Markdown tables: codebook sizes, and the cache."""
    base = result["config"]["model"]["n_code"]
    rows = result["ablation"]
    by_size = [(f"{row['n_code']:,}", row) for row in rows if row["compressive_cache"]]
    by_cache = [
        ("yes" if row["compressive_cache"] else "no", row) for row in rows if row["n_code"] == base
    ]
    return "\n\n".join(
        _table(title, chosen, base, result["seeds"])
        for title, chosen in (
            ("codes", by_size),
            (f"compressive cache, {base:,} codes", by_cache),
        )
    )


def _table(title: str, rows: list[tuple[str, dict[str, Any]]], base: int, seeds: int) -> str:
    lines = [
        f"| {title} | validation bits per byte, mean of {seeds} | standard deviation "
        f"| latency, {base:,} codes = 1 |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in rows:
        spread = "" if row["spread"] is None else f"{row['spread']:.4f}"
        figures = f"{row['mean_bits_per_byte']:.4f} | {spread} | {row['latency']:.3f}"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def _folder(out: Path, setting: Setting, seed: int) -> Path:
    return out / f"{setting.name}-seed-{seed}"


def _best_bits_per_byte(run: Path) -> float:
    return min(row["bits_per_byte"] for row in read_metrics(run) if row["kind"] == "validation")
