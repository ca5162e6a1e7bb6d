"""Grids of training runs: several variants of a config with several seeds each.

Every trial is a run folder and a result file next to it, and is trained in a subprocess. Finished
trials are skipped, so an interrupted grid continues where it stopped; so do grids whose results are
in a record from another machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import Interrupted, Record, config_record
from measure import machine
from runs import thinned_curve
from transformer_vq.config import NEUTRAL_FIELDS, RunConfig
from transformer_vq.data.prepare import prepare
from transformer_vq.device import find_device, keep_freed_memory
from transformer_vq.errors import UserError
from transformer_vq.evaluation import Evaluation
from transformer_vq.files import check_can_write, read_json, write_json
from transformer_vq.progress import TerminalReporter, info, progress_bar, reporting
from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume

SECONDS_TO_SAVE = 120.0  # after Ctrl-C, before a trial is killed


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
    trials: Sequence[Trial],
    runs: Path,
    out: Path,
    jobs: int,
    record: Callable[[list[Record]], Mapping[str, object]],
) -> list[Record]:
    """Run all trials that are not in the record `out` yet; return the rows of the record.

    The record is written after every trial, and keeps trials of earlier commands. Ctrl-C saves all
    runs and raises Interrupted.
    """
    check_can_write("--out", out, overwrite=True)
    rows = {row["name"]: row for row in recorded_rows(out)}
    try:
        for row in run_trials(trials, runs, list(rows.values()), jobs):
            _check_corpus(row, rows.values(), out)
            rows[row["name"]] = row
            write_json(out, record(_ordered(rows, trials)))
    except KeyboardInterrupt:
        info("stopped and saved; run the same command again to continue")
        raise Interrupted(record(_ordered(rows, trials))) from None
    return _ordered(rows, trials)


def _check_corpus(row: Record, recorded: Iterable[Record], out: Path) -> None:
    """Raise UserError if a variant was recorded with other data, whose paths are not recorded."""
    if any(x["corpus"] != row["corpus"] for x in recorded if x["variant"] == row["variant"]):
        raise UserError(
            f"{out} has trials of {row['variant']} on other data; give another --out, or the same "
            "data"
        )


def _ordered(rows: dict[str, Record], trials: Sequence[Trial]) -> list[Record]:
    """Return the rows of these trials, as far as they are finished, then all others."""
    names = [trial.name for trial in trials if trial.name in rows]
    return [rows[name] for name in dict.fromkeys([*names, *rows])]


def run_trials(
    trials: Sequence[Trial], runs: Path, recorded: Iterable[Record] = (), jobs: int = 1
) -> Iterator[Record]:
    """Train and evaluate all trials that are not recorded; yield their rows as they finish.

    jobs: number of trials that run at the same time, each with its share of the cores. Ctrl-C saves
    the trials and raises KeyboardInterrupt.
    """
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1")
    known = {row["name"]: row for row in recorded}
    todo = []
    for trial in trials:
        is_recorded = trial.name in known
        if is_recorded or _result(runs, trial.name).is_file():
            row = known[trial.name] if is_recorded else read_json(_result(runs, trial.name))
            _check_same(trial, row)
            if not is_recorded:
                yield row
        else:
            todo.append(trial)
    active: dict[str, subprocess.Popen[bytes]] = {}
    done = len(trials) - len(todo)
    with progress_bar("trials", len(trials), "runs", done) as advance:
        try:
            while todo or active:
                while todo and len(active) < jobs:
                    trial = todo.pop(0)
                    active[trial.name] = _start(trial, runs, jobs)
                advance(0, note=", ".join(active))
                time.sleep(0.2)
                for name in [name for name, child in active.items() if child.poll() is not None]:
                    _check_status(name, active.pop(name), runs)
                    advance(1)
                    yield read_json(_result(runs, name))
        finally:
            _stop(active.values())


def recorded_rows(path: Path) -> list[Record]:
    """Return the trials of a record that an earlier command wrote; none if it does not exist."""
    if not path.exists():
        return []
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("trials"), list):
        raise UserError(f"{path} is not a record of trials; choose another --out")
    rows: list[Record] = record["trials"]
    return rows


def spread(values: Sequence[float]) -> Record:
    """Return the mean and the standard deviation of several seeds."""
    return {"mean": mean(values), "deviation": stdev(values) if len(values) > 1 else None}


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


def _result(runs: Path, name: str) -> Path:
    return runs / f"{name}.json"


def write_spec(trial: Trial, runs: Path) -> Path:
    """Write what the subprocess of a trial reads; return the path."""
    runs.mkdir(parents=True, exist_ok=True)
    spec = runs / f"{trial.name}.spec.json"
    write_json(
        spec,
        {
            "variant": trial.variant,
            "seed": trial.seed,
            "config": trial.config.to_dict(),
            "position_len": trial.position_len,
        },
    )
    return spec


def _start(trial: Trial, runs: Path, jobs: int) -> subprocess.Popen[bytes]:
    """Start the subprocess of a trial; its messages go to a log file next to the run folder."""
    spec = write_spec(trial, runs)
    command = [sys.executable, __file__, str(spec), str(os.getpid())]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if jobs > 1 else {})
    with open(runs / f"{trial.name}.log", "ab") as log:
        # A group of its own: Ctrl-C reaches only this process, which then stops the trials.
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _check_status(name: str, child: subprocess.Popen[bytes], runs: Path) -> None:
    """Raise UserError with the last line of the log if a trial failed.

    A trial that was stopped by a signal and saved stops the grid.
    """
    if child.returncode == 0:
        return
    if child.returncode > 128:
        raise KeyboardInterrupt
    log = (runs / f"{name}.log").read_text(errors="replace").strip()
    reason = log.splitlines()[-1] if log else f"exit status {child.returncode}"
    raise UserError(f"{name} failed: {reason} (log: {runs / f'{name}.log'})")


def _stop(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """Let trials save and end; kill those that take too long."""
    children = list(children)
    for child in children:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_SAVE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


POINTS = 40  # of the training curve in a record


def run_trial(spec: Path) -> int:
    """Train and evaluate a trial and write its result; return the exit status."""
    values = read_json(spec)
    name = spec.name.removesuffix(".spec.json")
    folder = spec.parent / name
    result = train_or_resume(RunConfig.from_dict(values["config"]), folder)
    if not result.finished:
        return 128 + (result.stopped_by or 0)
    write_json(spec.parent / f"{name}.json", _row(values, name, folder))
    return 0


def _row(values: dict[str, Any], name: str, folder: Path) -> Record:
    config = read_config(folder)
    device = find_device(config.train.device)

    def bits(split: str, seq_len: int | None = None) -> Evaluation:
        found = evaluate(
            folder, split=split, protocols=["windowed"], seq_len=seq_len, device=device
        )
        return found.protocols["windowed"]

    test = bits("test")
    length = values["position_len"] or config.train.seq_len
    at_length = test if length == config.train.seq_len else bits("test", length)
    rows = read_metrics(folder)
    return {
        "name": name,
        "variant": values["variant"],
        "seed": values["seed"],
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


def _save_and_end_with_parent(parent: int) -> None:
    """Wait for the parent to end, then stop like Ctrl-C does."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the trial that the command line names."""
    if len(sys.argv) > 2:  # given by the parent: it may have ended before this line
        parent = int(sys.argv[2])
        threading.Thread(target=_save_and_end_with_parent, args=(parent,), daemon=True).start()
    keep_freed_memory()
    with reporting(TerminalReporter()):
        try:
            status = run_trial(Path(sys.argv[1]))
        except UserError as error:
            sys.exit(str(error))
    sys.exit(status)


if __name__ == "__main__":
    main()
