"""A run from its first update to its last, in as many sittings as it takes: train, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from transformer_vq.checkpoint import (
    CheckpointError,
    load_model,
    locked,
    newest_checkpoint,
    read_config,
)
from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpora import Corpus, prepare
from transformer_vq.files import write_json
from transformer_vq.nn.device import find_device, total_memory
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import warn
from transformer_vq.sizes import sizes
from transformer_vq.training.loop import Result, Sitting
from transformer_vq.training.metrics import check_loggers, rewind
from transformer_vq.training.step import Trainer

USABLE_MEMORY = 0.7  # the part of a device that a run may plan with

# What may change between two sittings of a run without making it another one. device, recompute
# and compile may change the last bits of an update; the others touch none.
FREE_FIELDS = {
    *("data.path", "data.cache", "train.device", "train.recompute", "train.compile"),
    *("train.log_every", "train.eval_every", "train.eval_tokens", "train.save_every"),
    *("train.keep", "train.tensorboard", "train.wandb"),
    *("parallel.dp", "parallel.fsdp", "parallel.cp", "parallel.tp"),
}


def train(config: RunConfig, run: Path) -> Result:
    """Begin a run in the folder `run`, which must not hold one yet."""
    if (run / "config.json").exists():
        raise CheckpointError(f"{run} already holds a run; go on with `tvq resume {run}`")
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file; give the name of a new folder")
    config = _with_absolute_paths(config)
    check_loggers(config)
    device = find_device(config.train.device)
    corpus = prepare(config.data, config.model.vocab_size)
    batches = training_batches(config, corpus)
    config = with_parts_that_fit(config, total_memory(device))
    trainer = _first_trainer(config, device)
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):
        write_json(run / "config.json", config.to_dict())
        corpus.tokenizer().save(run)
        return Sitting(run, config, corpus, batches, trainer).go()


def resume(run: Path, config: RunConfig | None = None) -> Result:
    """Go on from the newest checkpoint that can be read, bit for bit as if never interrupted.

    config: the run's own with changes; raises CheckpointError naming those that would make it
    another run.
    """
    stored = read_config(run)
    config = stored if config is None else config
    _check_same(stored, config, run)
    check_loggers(config)
    device = find_device(config.train.device)
    corpus = prepare(config.data, config.model.vocab_size)
    batches = training_batches(config, corpus)
    with locked(run):
        checkpoint = newest_checkpoint(run)
        if checkpoint is None:
            warn(f"{run} has no checkpoint yet: starting from the beginning")
            trainer = _first_trainer(config, device)
            sitting = Sitting(run, config, corpus, batches, trainer)
        else:
            _check_same(RunConfig.from_dict(checkpoint.facts["config"]), config, run)
            if checkpoint.facts["corpus"] != corpus.sha256:
                raise CheckpointError(
                    f"the data of {run} have changed since it began; bring back the old ones"
                )
            trainer = Trainer(checkpoint.model, config, device)
            trainer.load_tensors(checkpoint.tensors)
            sitting = Sitting(run, config, corpus, batches, trainer)
            sitting.step = sitting.saved_at = checkpoint.step
            sitting.validated_at = checkpoint.facts["validated_at"]
            best_loss = checkpoint.facts["best_loss"]
            sitting.best_loss = math.inf if best_loss is None else best_loss
        rewind(run, sitting.step, sitting.validated_at)
        write_json(run / "config.json", config.to_dict())
        return sitting.go()


def train_or_resume(config: RunConfig, run: Path) -> Result:
    """Begin a run, or go on with the one that was begun in this folder with the same config."""
    if not (run / "config.json").exists():
        return train(config, run)
    config = _with_absolute_paths(config)
    if not config.train.accumulate:  # was left open, and decided when the run began
        parts = read_config(run).train.accumulate
        config = replace(config, train=replace(config.train, accumulate=parts))
    return resume(run, config)


def _first_trainer(config: RunConfig, device: torch.device) -> Trainer:
    """The beginning of a run: everything random follows from its seed."""
    torch.manual_seed(config.train.seed)
    return Trainer(_first_model(config), config, device)


def _first_model(config: RunConfig) -> TransformerVQ:
    """Fresh weights, or those of the run or file that `train.init_from` names."""
    if config.train.init_from is None:
        return TransformerVQ(config.model)
    model, _ = load_model(Path(config.train.init_from))
    if model.config != config.model:
        other = replace(config, model=model.config)
        fields = ", ".join(config.differences(other))
        raise CheckpointError(f"{config.train.init_from} is another model: {fields} differ")
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


def with_parts_that_fit(config: RunConfig, memory: int) -> RunConfig:
    """If `train.accumulate` leaves it open: the fewest parts of a batch that fit into memory."""
    if config.train.accumulate:
        return config
    n_rows = config.train.batch_size
    for accumulate in (n for n in range(1, n_rows + 1) if n_rows % n == 0):
        chosen = replace(config, train=replace(config.train, accumulate=accumulate))
        if sizes(chosen).train_bytes <= USABLE_MEMORY * memory:
            break
    else:
        warn("one sequence at a time may be too much for this memory; train.recompute takes less")
    return chosen


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
            f"{run} was begun with another config: {', '.join(named)}; resume without these "
            "changes, or begin a new run (train.init_from takes over the weights)"
        )
