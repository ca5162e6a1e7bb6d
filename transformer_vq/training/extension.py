"""Changes to a resumed run: which ones are possible, and from which step they apply.

Under wsd the learning rate of a step before the decay does not depend on the number of steps. A
run is extended from the start of its decay, so it becomes, bit for bit, the run that had more steps
from the beginning. Under cosine it depends on the number of steps everywhere. A cosine can only be
stretched on request, from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transformer_vq.config import FREE_FIELDS, RunConfig
from transformer_vq.parallel.world import World
from transformer_vq.progress import info
from transformer_vq.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    newest_checkpoint,
)
from transformer_vq.training.optim import learning_rate

SCHEDULE_FIELDS = ("train.steps", "optim.decay_share")
FLAG = "--allow-schedule-change"


def check_same_run(
    stored: RunConfig, config: RunConfig, run: Path, allowed: Collection[str] = FREE_FIELDS
) -> None:
    """Raise CheckpointError if a field has changed that is not allowed to change."""
    changed = stored.differences(config)
    named = [f"{k} ({a} -> {b})" for k, (a, b) in changed.items() if k not in allowed]
    if named:
        raise CheckpointError(
            f"{run} was started with another config: {', '.join(named)}; resume without these "
            f"changes, or start a new run from its weights (--train.init-from {run})"
        )


def find_checkpoint(
    run: Path, stored: RunConfig, config: RunConfig, world: World, allow_schedule_change: bool
) -> tuple[Checkpoint | None, int]:
    """Return the checkpoint to resume from, and the step of the newest one.

    It is the newest one, or that at the start of the decay; None for the start of the run. All
    ranks call this together. Raises CheckpointError if the config cannot change like this.
    """
    newest = newest_checkpoint(run, world)
    done = 0 if newest is None else newest.step
    step = resume_step(run, stored, config, done, allow_schedule_change)
    if step in (0, done):
        return (newest if step else None), done
    try:
        return load_checkpoint(run, step, world), done
    except CheckpointError as error:
        problem = f"{run} cannot be extended without its checkpoint before the decay, step {step}"
        fix = f"restore it, or use {FLAG} to continue from the newest checkpoint"
        raise CheckpointError(f"{problem} ({error}); {fix}") from error


def resume_step(
    run: Path, stored: RunConfig, config: RunConfig, newest: int, allow_schedule_change: bool
) -> int:
    """Return the step to resume from: that of the newest checkpoint, or the start of the decay.

    stored: the config of the run so far. newest: step of the newest checkpoint, 0 without one.
    Raises CheckpointError if the change of the schedule is not possible.
    """
    if not any(name in SCHEDULE_FIELDS for name in stored.differences(config)):
        return newest
    if config.train.steps < newest:
        done = f"{run} has already completed {newest:,} steps"
        raise CheckpointError(f"{done}; use --train.steps {newest} or more")
    if allow_schedule_change:
        return newest
    before, after = stored.train.steps, config.train.steps
    if config.optim.schedule == "cosine":
        problem = f"{run} has a cosine schedule, which depends on train.steps ({before} -> {after})"
        fix = f"use {FLAG} to stretch it from here, or start a new run (--train.init-from {run})"
        raise CheckpointError(f"{problem}; {fix}")
    old, new = (c.optim.decay_start(c.train.steps) for c in (stored, config))
    if newest <= min(old, new):
        return newest
    if new < old:
        problem = f"the decay would start at step {new:,}, but {run} has completed {newest:,} steps"
        fix = f"use more --train.steps, a smaller --optim.decay-share, or {FLAG}"
        raise CheckpointError(f"{problem}; {fix}")
    return old


def report_changes(stored: RunConfig, config: RunConfig, newest: int, step: int) -> None:
    """Report which steps are trained again, and a jump of the learning rate."""
    if step < newest:
        again = f"steps {step + 1:,}-{newest:,} are trained again"
        info(f"extending from step {step:,} (before the decay): {again}")
    sizes = [(c.optim, c.train.steps) for c in (stored, config)]
    old, new = (learning_rate(optim, min(step, steps), steps) for optim, steps in sizes)
    if old != new:
        info(f"learning rate at step {step:,}: {old:.3g} -> {new:.3g}")
