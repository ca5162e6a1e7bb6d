"""Grids of training runs: several variants of a config with several seeds each.

Every trial is a run folder and a result file next to it. Finished trials are skipped, so an
interrupted grid continues where it stopped; so do grids whose results are in a record from another
machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import Interrupted, Record, config_record
from measure import machine
from runs import thinned_curve
from transformer_vq.config import NEUTRAL_FIELDS, RunConfig
from transformer_vq.data.prepare import prepare
from transformer_vq.device import find_device
from transformer_vq.errors import UserError
from transformer_vq.evaluation import Evaluation
from transformer_vq.files import check_can_write, read_json, write_json
from transformer_vq.progress import info
from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume

POINTS = 40  # of the training curve in a record


@dataclass(frozen=True)
class Trial:
    """One training run: a variant of a config with one seed.

    position_len: length of the contexts in which the loss by position is measured; None uses the
    sequence length of the run.
    """

    variant: str
    seed: int
    config: RunConfig
    position_len: int | None = None

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"{self.variant}-seed-{self.seed}"


def trials_of(
    variants: dict[str, RunConfig], seeds: int, position_len: int | None = None
) -> list[Trial]:
    """Return every variant with every seed, all variants of a seed before the next seed."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    return [
        Trial(name, seed, replace(config, train=replace(config.train, seed=seed)), position_len)
        for seed in range(seeds)
        for name, config in variants.items()
    ]


def run_grid(
    trials: Sequence[Trial], runs: Path, out: Path, record: Callable[[list[Record]], Record]
) -> Record:
    """Run all trials that are not in the record `out` yet; return the record.

    The record is written after every trial, and keeps trials of earlier commands. Ctrl-C saves the
    run and raises Interrupted.
    """
    check_can_write("--out", out, overwrite=True)
    rows = {row["name"]: row for row in _recorded_rows(out)}
    for trial in trials:  # before the first one is trained
        if trial.name in rows:
            _check_same(trial, rows[trial.name])
    try:
        for number, trial in enumerate(trials, start=1):
            if trial.name in rows:
                continue
            info(f"[{number}/{len(trials)}] {trial.variant}, seed {trial.seed}")
            row = run_trial(trial, runs)
            _check_corpus(row, rows.values(), out)
            rows[trial.name] = row
            write_json(out, record(_ordered(rows, trials)))
    except KeyboardInterrupt:
        info("stopped and saved; run the same command again to continue")
        raise Interrupted(record(_ordered(rows, trials))) from None
    return record(_ordered(rows, trials))


def run_trial(trial: Trial, runs: Path) -> Record:
    """Train and evaluate a trial; return its row, which is also written next to the run folder."""
    result = runs / f"{trial.name}.json"
    if result.is_file():
        row: Record = read_json(result)
        _check_same(trial, row)
        return row
    runs.mkdir(parents=True, exist_ok=True)
    if not train_or_resume(trial.config, runs / trial.name).finished:
        raise KeyboardInterrupt
    row = _row(trial, runs / trial.name)
    write_json(result, row)
    return row


def _row(trial: Trial, folder: Path) -> Record:
    config = read_config(folder)
    device = find_device(config.train.device)

    def bits(split: str, seq_len: int | None = None) -> Evaluation:
        found = evaluate(
            folder, split=split, protocols=["windowed"], seq_len=seq_len, device=device
        )
        return found.protocols["windowed"]

    test = bits("test")
    length = trial.position_len or config.train.seq_len
    at_length = test if length == config.train.seq_len else bits("test", length)
    rows = read_metrics(folder)
    return {
        "name": trial.name,
        "variant": trial.variant,
        "seed": trial.seed,
        "config": config_record(config),
        "corpus": prepare(config.data, config.model.vocab_size).sha256,
        "parameters": sizes(config).parameters,
        "tokens": config.train.steps * config.train.batch_size * config.train.backprop_len,
        "minutes": sum(row["seconds"] for row in rows) / 60,
        "validation": bits("validation").bits_per_byte,
        "test": test.bits_per_byte,
        "by_position": at_length.to_dict()["by_position"],
        "position_len": length,
        "curve": thinned_curve(rows, POINTS),
        "machine": machine(device),
    }


def spread(values: Sequence[float]) -> Record:
    """Return the mean and the standard deviation of several seeds."""
    return {"mean": mean(values), "deviation": stdev(values) if len(values) > 1 else None}


def _recorded_rows(path: Path) -> list[Record]:
    """Return the trials of a record that an earlier command wrote; none if it does not exist."""
    if not path.exists():
        return []
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("trials"), list):
        raise UserError(f"{path} is not a record of trials; choose another --out")
    rows: list[Record] = record["trials"]
    return rows


def _ordered(rows: dict[str, Record], trials: Sequence[Trial]) -> list[Record]:
    """Return the rows of these trials, as far as they are finished, then all others."""
    names = [trial.name for trial in trials if trial.name in rows]
    return [rows[name] for name in dict.fromkeys([*names, *rows])]


def _check_corpus(row: Record, recorded: Iterable[Record], out: Path) -> None:
    """Raise UserError if a variant was recorded with other data, whose paths are not recorded."""
    if any(x["corpus"] != row["corpus"] for x in recorded if x["variant"] == row["variant"]):
        raise UserError(
            f"{out} has trials of {row['variant']} on other data; give another --out, or the same "
            "data"
        )


def _check_same(trial: Trial, row: Record) -> None:
    """Raise UserError if a recorded trial had another config."""
    want, found = (_comparable(x) for x in (config_record(trial.config), row["config"]))
    if differing := sorted(
        name for name in want.keys() | found.keys() if want.get(name) != found.get(name)
    ):
        raise UserError(
            f"{trial.name} was recorded with another {', '.join(differing)}; give another --out "
            "and --runs, or the same options"
        )


def _comparable(record: Any) -> dict[str, Any]:
    """Return the fields of a config that determine the result of a trial, after a JSON round trip.

    The size of a learned vocabulary is known only after the data were prepared.
    """
    plain = json.loads(json.dumps(record))
    return {
        f"{part}.{name}": value
        for part, values in plain.items()
        for name, value in values.items()
        if f"{part}.{name}" not in NEUTRAL_FIELDS | {"model.vocab_size"}
    }
