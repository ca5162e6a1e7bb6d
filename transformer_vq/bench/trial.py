"""One trial of a grid, as a process of its own: train or resume a run, then evaluate it.

    python -m transformer_vq.bench.trial NAME.spec.json [PARENT]

The run folder NAME and the result NAME.json are next to the spec. The process ends when the one
with the number PARENT does; SIGTERM saves the run first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from transformer_vq.bench.cells import machine
from transformer_vq.bench.compare import thinned_curve
from transformer_vq.bench.records import config_record
from transformer_vq.bench.trial_records import TrialRow
from transformer_vq.config import RunConfig
from transformer_vq.data.corpus import prepare
from transformer_vq.device import find_device, keep_freed_memory
from transformer_vq.errors import UserError
from transformer_vq.evaluation import Evaluation
from transformer_vq.files import read_json, write_json
from transformer_vq.progress import TerminalReporter, reporting
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train_or_resume
from transformer_vq.training.sizes import sizes

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


def _row(values: dict[str, Any], name: str, folder: Path) -> TrialRow:
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
