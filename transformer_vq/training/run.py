"""Start and resume training runs: `train` and `resume`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from transformer_vq.config import RunConfig
from transformer_vq.config.data import LEARNED
from transformer_vq.config.run import FREE_FIELDS
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus, prepare
from transformer_vq.device import total_memory
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.world import World, join_world
from transformer_vq.progress import Reporter, reporting, warn
from transformer_vq.training.checkpoint import (
    CONFIG,
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
from transformer_vq.training.loop import Progress, TrainingLoop, TrainingResult
from transformer_vq.training.metrics import check_loggers, rewind
from transformer_vq.training.sizes import memory_hint, sizes
from transformer_vq.training.step import Trainer

USABLE_MEMORY = 0.7  # fraction of a device's memory that `choose_accumulation` plans with


def train(
    config: RunConfig, out: str | os.PathLike[str], *, reporter: Reporter | None = None
) -> TrainingResult:
    """Start a training run in the folder `out` and train until its last step or a signal.

    The data are prepared first if they are not in the cache yet. Ctrl-C, SIGTERM and SIGHUP stop
    the run after the current step and save it; `resume` continues it. Under `torchrun` all
    processes call this function; after an elastic restart it resumes the run.

    config: for example a preset, `PRESETS["tiny"]`, changed with `dataclasses.replace`.
    out: created if it does not exist; must not already contain a run.
    reporter: receives progress and messages, for example a `TerminalReporter`. By default progress
    is not shown, and warnings go to the logger "transformer_vq".

    Raises UserError if the run cannot be started; nothing is written to `out` then. Raises
    TrainingError if it cannot continue, because the loss is not finite or the disk is full.
    """
    run = Path(out)
    with reporting(reporter), join_world(config.parallel, config.train.device) as world:
        is_restart = world.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)
        if is_restart and _is_run_folder(run, world):
            return _resume(run, read_config(run), world)
        _check_is_new(run, world)
        config = _with_absolute_paths(config)
        check_mesh(config, world.mesh)
        check_loggers(config)
        corpus = _prepare_corpus(config, world)
        config = replace(config, model=replace(config.model, vocab_size=corpus.vocab_size))
        batches = training_batches(config, corpus)
        config = choose_accumulation(config, _memory_per_process(world), world)
        _check_memory(config, world)
        trainer = _new_trainer(config, world)
        with _locked_by_rank_zero(run, world):
            _check_is_new(run, world)  # another process may have started a run in the meantime
            if world.is_rank_zero:
                tokenizer = corpus.tokenizer()
                tokenizer.save(run)
                write_config(run, config, tokenizer)
            return TrainingLoop(run, config, corpus, batches, trainer).run()


def resume(
    run: str | os.PathLike[str],
    config: RunConfig | None = None,
    *,
    reporter: Reporter | None = None,
) -> TrainingResult:
    """Resume a run from its newest valid checkpoint and train until its last step or a signal.

    The result is the same, bit for bit, as if the run had not been interrupted. A finished run is
    left unchanged.

    run: a run folder that `train` has created.
    config: the config of the run with changes, by default without any. Logging, validation and
    checkpoint intervals, `data.path`, the device and the mesh may change. Another device or mesh
    affects rounding only.
    reporter: as in `train`.

    Raises CheckpointError if `run` is not a run folder, all its checkpoints are corrupt, the data
    have changed, or `config` changes other fields; the message names them. Raises TrainingError as
    `train` does.
    """
    run = Path(run)
    stored = read_config(run)
    config = stored if config is None else config
    _check_same_run(stored, config, run)
    with reporting(reporter), join_world(config.parallel, config.train.device) as world:
        return _resume(run, config, world)


def train_or_resume(config: RunConfig, run: Path) -> TrainingResult:
    """Start a run, or resume it if the folder already contains one with the same config."""
    if not (run / CONFIG).exists():
        return train(config, run)
    config = _with_absolute_paths(config)
    if not config.train.accumulate:  # chosen when the run was started
        accumulate = read_config(run).train.accumulate
        config = replace(config, train=replace(config.train, accumulate=accumulate))
    return resume(run, config)


def _resume(run: Path, config: RunConfig, world: World) -> TrainingResult:
    check_mesh(config, world.mesh)
    check_loggers(config)
    corpus = _prepare_corpus(config, world)
    batches = training_batches(config, corpus)
    with _locked_by_rank_zero(run, world):
        checkpoint = _newest_checkpoint(run, world)
        if checkpoint is None:
            warn(f"{run} has no checkpoint yet; starting from the first step")
            trainer, progress = _new_trainer(config, world), Progress()
        else:
            _check_same_run(RunConfig.from_dict(checkpoint.metadata["config"]), config, run)
            if checkpoint.metadata["corpus"] != corpus.sha256:
                raise CheckpointError(
                    f"the data of {run} have changed since it was started; restore them, or start "
                    "a new run"
                )
            trainer = Trainer(checkpoint.model, config, world.device, world)
            trainer.load_tensors(checkpoint.tensors)
            progress = Progress.from_checkpoint(checkpoint)
        if world.is_rank_zero:
            rewind(run, progress.step, progress.validated_at)
            write_config(run, config, read_tokenizer(run))
        return TrainingLoop(run, config, corpus, batches, trainer, progress).run()


def _is_run_folder(run: Path, world: World) -> bool:
    """Return whether the folder contains a run; rank 0 decides for all ranks."""
    return bool(world.from_rank_zero(int((run / CONFIG).exists())))


def _check_is_new(run: Path, world: World) -> None:
    """Raise CheckpointError if no run can be started in this folder."""
    if _is_run_folder(run, world):
        raise CheckpointError(
            f"{run} already contains a run; use `tvq resume {run}` or another --out"
        )
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file; use another --out")


def _check_same_run(stored: RunConfig, config: RunConfig, run: Path) -> None:
    """Raise CheckpointError if a field has changed that affects the training."""
    changed = stored.differences(config)
    named = [f"{k} ({a} -> {b})" for k, (a, b) in changed.items() if k not in FREE_FIELDS]
    if named:
        raise CheckpointError(
            f"{run} was started with another config: {', '.join(named)}; resume without these "
            f"changes, or start a new run from its weights (--train.init-from {run})"
        )


def _newest_checkpoint(run: Path, world: World) -> Checkpoint | None:
    """Return the newest checkpoint that is valid on rank 0, on all ranks."""
    found = newest_checkpoint(run) if world.is_rank_zero else None
    step = world.from_rank_zero(-1 if found is None else found.step)
    if found is None and step >= 0:
        found = load_checkpoint(run, step)
    return found


@contextmanager
def _locked_by_rank_zero(run: Path, world: World) -> Iterator[None]:
    """Create the run folder and hold its lock; rank 0 does so for all ranks."""
    if not world.is_rank_zero:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):
        yield


def _prepare_corpus(config: RunConfig, world: World) -> Corpus:
    with world.local_rank_zero_first():
        return prepare(config.data, config.model.vocab_size)


def training_batches(config: RunConfig, corpus: Corpus) -> TrainingBatches:
    """Return the batches of all steps of a run."""
    train = config.train
    return TrainingBatches(
        corpus.split("train"), train.batch_size, train.seq_len, train.backprop_len, train.seed
    )


def _new_trainer(config: RunConfig, world: World) -> Trainer:
    """Return the trainer at the start of a run; all random numbers follow from its seed."""
    torch.manual_seed(config.train.seed)
    return Trainer(_initial_model(config), config, world.device, world)


def _initial_model(config: RunConfig) -> TransformerVQ:
    """Return a new model, or that of the run or file `train.init_from`."""
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
    """Make all paths absolute, so that the run can be resumed from another working directory."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    def all_absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(absolute(path)) for path in paths)

    data = config.data
    has_file = data.tokenizer_name not in ("bytes", *LEARNED)
    data = replace(
        data,
        path=all_absolute(data.path),
        validation_path=all_absolute(data.validation_path),
        test_path=all_absolute(data.test_path),
        tokenizer=absolute(data.tokenizer) if has_file else data.tokenizer,
    )
    init_from = absolute(config.train.init_from)
    return replace(config, data=data, train=replace(config.train, init_from=init_from))


def choose_accumulation(config: RunConfig, memory: int, world: World | None = None) -> RunConfig:
    """Return the config with the fewest micro-batches that fit into `memory` bytes.

    A config with a fixed `train.accumulate` (not 0) is returned unchanged. world: the processes
    that share a batch; a single process by default.
    """
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
    """Raise UserError if not even the weights, gradients and optimizer fit into memory."""
    needed = sizes(replace(config, parallel=world.mesh))
    total = total_memory(world.device)
    least = 2 * needed.weight_bytes + needed.optimizer_bytes
    if least > total:
        raise UserError(
            f"out of memory: weights, gradients and optimizer take {least / 1e9:,.1f} GB, this "
            f"device has {total / 1e9:,.1f} GB; {memory_hint(config)}"
        )


def _memory_per_process(world: World) -> int:
    """Return the bytes of memory for this process; CPU processes of a machine share its memory."""
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.device.type == "cpu" else 1
    return total_memory(world.device) // n
