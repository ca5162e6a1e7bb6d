"""tvq bench recall: accuracy of recall by context length, codebook size and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.bench.recall_records import (
    RecallModel,
    RecallSettings,
    RecallTask,
    candidates,
)
from transformer_vq.cli.arguments import UsageError, check_can_read, check_range, parse
from transformer_vq.cli.bench.common import MAX_REPEATS
from transformer_vq.cli.options import Device, Json

FlatSettings = Annotated[RecallSettings, tyro.conf.arg(name="")]
"""Settings whose options have no prefix."""
DEFAULTS = RecallSettings()


@dataclass(frozen=True)
class Recall:
    """Measure recall by context length and codebook size, next to other models of equal size.

    Small models are trained on tasks that are generated on the fly, and evaluated on longer
    contexts. Finished trainings are stored in --out. If interrupted, run the same command again to
    continue. The defaults take about two hours on one core.
    """

    settings: FlatSettings = DEFAULTS
    tasks: tuple[RecallTask, ...] = ("mqar", "copy", "needle")
    """mqar: values of several keys; copy: a string after noise; needle: a marked value in text."""
    models: tuple[RecallModel, ...] = ("full", "window", "vq", "mamba")
    """full: full attention; window: VQ attention without the cache; vq: VQ attention; mamba: the
    state-space model of Hugging Face transformers with about as many parameters."""
    codes: tuple[int, ...] = (8, 32, 128)
    """Codebook sizes of vq."""
    seeds: int = 3
    """Trainings per task and model."""
    text: Path | None = None
    """Text file to hide the value of needle in; by default random words."""
    out: Path = Path("runs/recall.json")
    """JSON file for the results, which `tvq plot` plots. Results that it contains are kept."""
    device: Device = "cpu"
    json: Json = False


def run(arguments: list[str]) -> int | None:
    """Train and evaluate all models, print tables; return the exit status."""
    options = parse(Recall, arguments, "bench recall")
    check_range("--seeds", options.seeds, 1, MAX_REPEATS)
    for name in ("tasks", "models", "codes"):
        if not getattr(options, name):
            raise UsageError(f"--{name}: give at least one value")
    for n in options.codes:
        check_range("--codes", n, 1, 2**20)
    check_can_read("--text", options.text)

    from transformer_vq.bench import recall
    from transformer_vq.cli.output import print_json
    from transformer_vq.device import find_device, keep_freed_memory

    keep_freed_memory()
    try:
        record = recall.run(
            options.out,
            options.tasks,
            candidates(options.models, options.codes),
            options.seeds,
            options.settings,
            options.text,
            find_device(options.device),
        )
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue")
        return 130
    print(recall.table(record))
    print_json(dict(record), options.json)
    return None
