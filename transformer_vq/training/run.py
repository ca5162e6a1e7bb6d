"""A run from its first update to its last, in as many sittings as it takes: train, resume."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus, prepare
from transformer_vq.device import total_memory
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.world import World, joined
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import (
    CONFIG,
    FREE_FIELDS,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_model,
    locked,
    newest_checkpoint,
    read_config,
    read_tokenizer,
    write_config,
)
from transformer_vq.training.loop import TrainingLoop, TrainingResult
from transformer_vq.training.metrics import check_loggers, rewind
from transformer_vq.training.sizes import memory_hint, sizes
from transformer_vq.training.step import Trainer

USABLE_MEMORY = 0.7  # the part of a device that a run may plan with


def train(config: RunConfig, run: Path) -> TrainingResult:
    """Start a run in the folder `run`, which must not already contain one.

    Under `torchrun` all processes call this; after an elastic restart the run is resumed.
    """
    with joined(config.parallel, config.train.device) as world:
        is_restart = world.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)
        if is_restart and _exists(run, world):
            return _resume(run, read_config(run), world)
        _check_new(run, world)
        config = _with_absolute_paths(config)
        check_mesh(config, world.mesh)
        check_loggers(config)
        corpus = _corpus(config, world)
        batches = training_batches(config, corpus)
        config = with_parts_that_fit(config, _memory(world), world)
        _check_memory(config, world)
        trainer = _first_trainer(config, world)
        with _sole_user(run, world):
            _check_new(run, world)  # again: another process may have been faster
            if world.is_rank_zero:
                tokenizer = corpus.tokenizer()
                tokenizer.save(run)
                write_config(run, config, tokenizer)
            return TrainingLoop(run, config, corpus, batches, trainer).run()


def _exists(run: Path, world: World) -> bool:
    """Whether the folder holds a run; rank 0 decides, so that all ranks do the same."""
    return bool(world.from_rank_zero(int((run / CONFIG).exists())))


def _check_new(run: Path, world: World) -> None:
    if _exists(run, world):
        raise CheckpointError(
            f"{run} already contains a run; use `tvq resume {run}` or another --out"
        )
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file; use another --out")


def resume(run: Path, config: RunConfig | None = None) -> TrainingResult:
    """Go on from the newest checkpoint that can be read, bit for bit as if never interrupted.

    config: the run's own with changes; raises CheckpointError naming those that would make it
    another run. The number of processes and their layout may be others than before.
    """
    stored = read_config(run)
    config = stored if config is None else config
    _check_same(stored, config, run)
    with joined(config.parallel, config.train.device) as world:
        return _resume(run, config, world)


def _resume(run: Path, config: RunConfig, world: World) -> TrainingResult:
    check_mesh(config, world.mesh)
    check_loggers(config)
    corpus = _corpus(config, world)
    batches = training_batches(config, corpus)
    with _sole_user(run, world):
        checkpoint = _agreed_checkpoint(run, world)
        if checkpoint is None:
            warn(f"{run} has no checkpoint yet; starting from the first step")
            trainer = _first_trainer(config, world)
            loop = TrainingLoop(run, config, corpus, batches, trainer)
        else:
            _check_same(RunConfig.from_dict(checkpoint.metadata["config"]), config, run)
            if checkpoint.metadata["corpus"] != corpus.sha256:
                raise CheckpointError(
                    f"the data of {run} have changed since it was started; restore them, or start "
                    "a new run"
                )
            trainer = Trainer(checkpoint.model, config, world.device, world)
            trainer.load_tensors(checkpoint.tensors)
            loop = TrainingLoop(run, config, corpus, batches, trainer)
            loop.step = loop.saved_at = checkpoint.step
            loop.validated_at = checkpoint.metadata["validated_at"]
            best_loss = checkpoint.metadata["best_loss"]
            loop.best_loss = math.inf if best_loss is None else best_loss
        if world.is_rank_zero:
            rewind(run, loop.step, loop.validated_at)
            write_config(run, config, read_tokenizer(run))
        return loop.run()


def train_or_resume(config: RunConfig, run: Path) -> TrainingResult:
    """Begin a run, or go on with the one that was begun in this folder with the same config."""
    if not (run / CONFIG).exists():
        return train(config, run)
    config = _with_absolute_paths(config)
    if not config.train.accumulate:  # was left open, and decided when the run began
        parts = read_config(run).train.accumulate
        config = replace(config, train=replace(config.train, accumulate=parts))
    return resume(run, config)


def _agreed_checkpoint(run: Path, world: World) -> Checkpoint | None:
    """The newest whole checkpoint that the first process finds, on all of them."""
    found = newest_checkpoint(run) if world.is_rank_zero else None
    step = world.from_rank_zero(-1 if found is None else found.step)
    if found is None and step >= 0:
        found = load_checkpoint(run, step)
    return found


@contextmanager
def _sole_user(run: Path, world: World) -> Iterator[None]:
    """The lock of a run is held by the first process for all of them."""
    if not world.is_rank_zero:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):
        yield


def _corpus(config: RunConfig, world: World) -> Corpus:
    with world.local_rank_zero_first():
        return prepare(config.data, config.model.vocab_size)


def _first_trainer(config: RunConfig, world: World) -> Trainer:
    """The beginning of a run: everything random follows from its seed."""
    torch.manual_seed(config.train.seed)
    return Trainer(_first_model(config), config, world.device, world)


def _first_model(config: RunConfig) -> TransformerVQ:
    """Fresh weights, or those of the run or file that `train.init_from` names."""
    if config.train.init_from is None:
        return TransformerVQ(config.model)
    model, _ = load_model(Path(config.train.init_from))
    if model.config != config.model:
        other = replace(config, model=model.config)
        fields = ", ".join(config.differences(other))
        raise CheckpointError(
            f"--train.init-from {config.train.init_from}: its model differs in {fields}; change "
            "these options to match"
        )
    return model


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """So that a run can be resumed from anywhere."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    data = replace(
        config.data, path=absolute(config.data.path), tokenizer=absolute(config.data.tokenizer)
    )
    init_from = absolute(config.train.init_from)
    return replace(config, data=data, train=replace(config.train, init_from=init_from))


def with_parts_that_fit(config: RunConfig, memory: int, world: World | None = None) -> RunConfig:
    """If `train.accumulate` leaves it open: the fewest parts of a batch that fit into memory."""
    if config.train.accumulate:
        return config
    world = World() if world is None else world
    n_rows = config.train.batch_size // world.mesh.n_rows
    for accumulate in (n for n in range(1, n_rows + 1) if n_rows % n == 0):
        chosen = replace(config, train=replace(config.train, accumulate=accumulate))
        needed = sizes(replace(chosen, parallel=world.mesh)).train_bytes
        if world.smallest(needed <= USABLE_MEMORY * memory):
            break
    else:
        warn(f"one sequence at a time may not fit in memory; {memory_hint(chosen)}")
    return chosen


def _check_memory(config: RunConfig, world: World) -> None:
    """Fail before anything is allocated if weights and optimizer alone cannot fit."""
    needed = sizes(replace(config, parallel=world.mesh))
    total = total_memory(world.device)
    least = 2 * needed.weight_bytes + needed.optimizer_bytes
    if least > total:
        raise UserError(
            f"out of memory: weights, gradients and optimizer take {least / 1e9:,.1f} GB, this "
            f"device has {total / 1e9:,.1f} GB; {memory_hint(config)}"
        )


def _memory(world: World) -> int:
    """Bytes for this process; those of one machine share what is not on a GPU."""
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.device.type == "cpu" else 1
    return total_memory(world.device) // n


def training_batches(config: RunConfig, corpus: Corpus) -> TrainingBatches:
    train = config.train
    return TrainingBatches(
        corpus.split("train"), train.batch_size, train.seq_len, train.backprop_len, train.seed
    )


def _check_same(stored: RunConfig, config: RunConfig, run: Path) -> None:
    changed = stored.differences(config)
    named = [f"{k} ({a} -> {b})" for k, (a, b) in changed.items() if k not in FREE_FIELDS]
    if named:
        raise CheckpointError(
            f"{run} was started with another config: {', '.join(named)}; resume without these "
            f"changes, or start a new run from its weights (--train.init-from {run})"
        )
