"""tvq resume: resume a run from its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from transformer_vq.cli.arguments import Flat, Json, Run, parse, run_name
from transformer_vq.cli.output import computing, config_fields, print_training_result
from transformer_vq.config import FREE_FIELDS
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class ResumeOptions:
    """Resume a run from its newest checkpoint, bit for bit as if it had not been interrupted.

    Settings of two kinds may change. These change the training from here on, and are recorded in
    RUN/history.jsonl: optim.lr, optim.lr-final-share, optim.decay-share, optim.weight-decay,
    optim.grad-clip, train.steps, train.accumulate and train.precision. All others do not affect the
    result, except that another device or process mesh, train.compile, train.reduction and
    train.checkpoint-activations may change the rounding.

    More --train.steps extend a run, even a finished one. With optim.schedule wsd it resumes from
    the start of its decay, and equals a run with that many steps from the beginning.
    """

    run: Flat
    name: Run
    """Run folder."""
    allow_schedule_change: bool = False
    """Continue from the newest checkpoint if --train.steps changes, although the new schedule had
    other learning rates in past steps. A cosine can be stretched in this way only."""
    json: Json = False


def run(arguments: list[str]) -> int:
    """Resume a run; return the exit status."""
    fixed = config_fields() - FREE_FIELDS
    name = run_name(arguments, "resume", ResumeOptions(PRESETS["tiny"], tyro.MISSING), fixed)

    from transformer_vq.training.checkpoint import read_config
    from transformer_vq.training.packaged import check_not_packaged, find_run
    from transformer_vq.training.run import resume

    check_not_packaged(find_run(name), name)
    default = ResumeOptions(read_config(Path(name)), name)
    options = parse(ResumeOptions, arguments, "resume", default)
    with computing("use --train.checkpoint-activations"):
        is_allowed = options.allow_schedule_change
        result = resume(Path(name), options.run, allow_schedule_change=is_allowed)
        return print_training_result(result, options.json)
