"""Start and resume training runs: `train` and `resume`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transformer_vq.config import LEARNED, NEUTRAL_FIELDS, RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.prepare import prepare
from transformer_vq.data.text import store_stdin
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.device import meta_device
from transformer_vq.nn.model import TransformerVQ, initial_weights
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.world import World, join_world
from transformer_vq.progress import Reporter, reporting, warn
from transformer_vq.sizes import check_memory, choose_accumulation
from transformer_vq.training.checkpoint import (
    CheckpointError,
    Progress,
    TrainingResult,
    locked,
    original_config,
    read_config,
    read_tokenizer,
    remove_checkpoints_after,
    restore_best,
    write_config,
)
from transformer_vq.training.extension import check_same_run, find_checkpoint, report_changes
from transformer_vq.training.loading import InitialModel
from transformer_vq.training.loop import TrainingLoop
from transformer_vq.training.metrics import (
    HISTORY,
    METRICS,
    Event,
    check_loggers,
    read_history,
    record,
    rewind,
)
from transformer_vq.training.packaged import is_packaged
from transformer_vq.training.run_list import BEST, CHECKPOINTS, CONFIG
from transformer_vq.training.step import Trainer

__all__ = ["read_history", "resume", "train", "train_or_resume", "training_batches"]


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
            stored = read_config(run)
            return _resume(run, stored, stored, stored, world)
        _check_is_new(run, world)
        start = _initial_model(config)
        config = _portable(config, start)
        check_mesh(config, world.mesh)
        check_loggers(config)
        corpus = _prepare_corpus(config, world)
        if start is not None:
            start.check_tokens(config.data, corpus.tokenizer())
        batches = training_batches(config, corpus)
        model = replace(config.model, vocab_size=corpus.vocab_size)
        config = choose_accumulation(replace(config, model=model), world)
        check_memory(config, world)
        if config.optim.schedule == "cosine" and config.optim.warmup >= config.train.steps:
            warn(
                f"--optim.warmup {config.optim.warmup}: the run ends after {config.train.steps} "
                "steps, before the peak learning rate; use a shorter warm-up"
            )
        trainer = _new_trainer(config, start, world)
        with locked(run, world.is_rank_zero):
            _check_is_new(run, world)  # another process may have started a run in the meantime
            if world.is_rank_zero:
                write_config(run, config, corpus.tokenizer())
                if start is not None:
                    start.copy_terms(run)
            record(run, "start", 0, world)
            return _run_loop(TrainingLoop(run, config, corpus, batches, trainer, Progress()))


def resume(
    run: str | os.PathLike[str],
    config: RunConfig | None = None,
    *,
    allow_schedule_change: bool = False,
    reporter: Reporter | None = None,
) -> TrainingResult:
    """Resume a run from its newest valid checkpoint and train until its last step or a signal.

    Without changes, the result is the same, bit for bit, as if the run had not been interrupted. A
    finished run is left unchanged.

    run: a run folder that `train` has created.
    config: the config of the run with changes, by default without any. `NEUTRAL_FIELDS` may change
    without affecting the result: logging, validation and checkpoint intervals, `data.path`, the
    device and the mesh. `RECORDED_FIELDS` change the training from here on: the learning rate,
    weight decay, clipping, `train.steps`, `train.accumulate` and `train.precision`.
    allow_schedule_change: continue from the newest checkpoint if `train.steps` changes, although
    the new schedule would have had other learning rates in past steps. By default, `train.steps`
    can change under wsd only; a run that is decaying then resumes from the start of its decay.
    reporter: as in `train`.

    Raises CheckpointError if `run` is not a run folder, all its checkpoints are corrupt, the data
    have changed, or `config` changes other fields; the message names them. Raises TrainingError as
    `train` does.
    """
    run = Path(run)
    with reporting(reporter):
        current = read_config(run)
        wanted = current if config is None else config
        stored = original_config(run, current)
        check_same_run(stored, wanted, run)
        with join_world(wanted.parallel, wanted.train.device) as world:
            return _resume(run, current, stored, wanted, world, allow_schedule_change)


def train_or_resume(config: RunConfig, run: Path) -> TrainingResult:
    """Start a run, or resume it if the folder already contains one with the same config."""
    if not (run / CONFIG).exists():
        return train(config, run)
    stored = read_config(run)
    wanted = _portable(config, _initial_model(config))
    if not wanted.train.accumulate:  # chosen when the run was started
        accumulate = stored.train.accumulate
        wanted = replace(wanted, train=replace(wanted.train, accumulate=accumulate))
    check_same_run(stored, wanted, run, NEUTRAL_FIELDS)
    return resume(run, wanted)


def _resume(
    run: Path,
    current: RunConfig,
    stored: RunConfig,
    wanted: RunConfig,
    world: World,
    allow_schedule_change: bool = False,
) -> TrainingResult:
    """Resume a run with the config `wanted`; `stored` is its config so far.

    current: the content of config.json, which differs from `stored` if it was edited.
    """
    check_mesh(wanted, world.mesh)
    check_loggers(wanted)
    config = choose_accumulation(wanted, world)
    corpus = _prepare_corpus(config, world)
    batches = training_batches(config, corpus)
    with locked(run, world.is_rank_zero):
        if world.is_rank_zero and read_config(run) != current:
            raise CheckpointError(f"{run} was changed by another process; resume it again")
        if read_tokenizer(run, current).sha256 != corpus.tokenizer().sha256:
            fix = "restore the file that was used when it was started, or start a new run"
            raise CheckpointError(f"the tokenizer of the data is not that of {run}; {fix}")
        checkpoint, newest = find_checkpoint(run, stored, config, world, allow_schedule_change)
        if checkpoint is None:
            if newest == 0:
                warn(f"{run} has no checkpoint yet; starting from the first step")
            trainer = _new_trainer(config, _initial_model(config), world)
            progress = Progress()
        else:
            check_same_run(checkpoint.config, config, run)
            if checkpoint.metadata["corpus"] != corpus.sha256:
                problem = f"the data of {run} have changed since it was started"
                raise CheckpointError(f"{problem}; restore them, or start a new run")
            with meta_device():
                model = TransformerVQ(config.model)
            trainer = Trainer(model, config, world.device, world)
            trainer.load(checkpoint.folder, checkpoint.index)
            progress = Progress.from_checkpoint(checkpoint)
        changed = stored.differences(config)
        if changed or not progress.is_finished(config):
            report_changes(stored, config, newest, progress.step)
            is_longer = config.train.steps > stored.train.steps
            record(run, "extend" if is_longer else "resume", progress.step, world, changed)
        if world.is_rank_zero:
            # In this order, a kill at any point leaves a run that resumes with the old or the new
            # config. A checkpoint of the old decay never meets the new config.
            if progress.step < newest:
                remove_checkpoints_after(run, progress.step)
            restore_best(run, checkpoint)
            rewind(run, progress.step, progress.logged_at, progress.validated_at)
            write_config(run, config)
        return _run_loop(TrainingLoop(run, config, corpus, batches, trainer, progress))


def _run_loop(loop: TrainingLoop) -> TrainingResult:
    """Run the training loop and record how it ended."""
    was_finished = loop.progress.is_finished(loop.config)
    result = loop.run()
    if not was_finished:
        event: Event = "finish" if result.finished else "stop"
        record(loop.folder, event, result.step, loop.trainer.world)
    return result


def _is_run_folder(run: Path, world: World) -> bool:
    """Return whether the folder contains a run; rank 0 decides for all ranks."""
    return bool(world.from_rank_zero(int((run / CONFIG).exists())))


def _check_is_new(run: Path, world: World) -> None:
    """Raise CheckpointError if no run can be started in this folder; rank 0 decides for all ranks.

    When another rank looks, rank 0 may have created its files already.
    """
    names = (CONFIG, METRICS, HISTORY, CHECKPOINTS, BEST)
    found = [i for i, name in enumerate(names) if (run / name).exists()]
    first = world.from_rank_zero(found[0] if found else len(names))
    if first == names.index(CONFIG):
        fix = f"use `tvq resume {run}` or another --out"
        raise CheckpointError(f"{run} already contains a run; {fix}")
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file; use another --out")
    if first < len(names):
        raise CheckpointError(f"{run} contains {names[first]} of something else; use another --out")


def _prepare_corpus(config: RunConfig, world: World) -> Corpus:
    is_checked_later = config.train.init_from is not None  # by `check_vocabulary`
    is_learned = config.data.tokenizer_name in LEARNED
    vocab_size = None if is_checked_later and not is_learned else config.model.vocab_size
    with world.local_rank_zero_first():
        return prepare(config.data, vocab_size)


def training_batches(config: RunConfig, corpus: Corpus) -> TrainingBatches:
    """Return the batches of all steps of a run."""
    train = config.train
    return TrainingBatches(
        corpus.split("train"), train.batch_size, train.seq_len, train.backprop_len, train.seed
    )


def _initial_model(config: RunConfig) -> InitialModel | None:
    """Return the model that a run starts from; None if it starts with random weights."""
    return None if config.train.init_from is None else InitialModel(config.train.init_from)


def _new_trainer(config: RunConfig, start: InitialModel | None, world: World) -> Trainer:
    """Return the trainer at the start of a run; all random numbers follow from its seed."""
    with meta_device():
        model = TransformerVQ(config.model)
    trainer = Trainer(model, config, world.device, world)
    torch.manual_seed(config.train.seed)
    weights = initial_weights(config.model) if start is None else start.weights(config.model)
    trainer.strategy.load_weights(weights)
    trainer.restart_average()
    return trainer


def _portable(config: RunConfig, start: InitialModel | None) -> RunConfig:
    """Return the config of a new run, which can be resumed from any working directory.

    Paths are absolute, and data from standard input are stored in the cache. Without a tokenizer of
    its own, the run has that of the model that it starts from. Raises CheckpointError if that model
    has another architecture, or if the data will have other bytes; other vocabularies are known
    only when the data are prepared.
    """

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    data = store_stdin(config.data, Path(os.path.expanduser(config.data.cache_folder)))
    tokenizer = data.tokenizer
    if tokenizer is not None and tokenizer not in ("bytes", *LEARNED):
        tokenizer = absolute(tokenizer)
    init_from = config.train.init_from
    if start is not None:
        start.check_architecture(config.model)
        if start.vocabulary is not None and tokenizer is None and not data.has_images:
            tokenizer = str(start.vocabulary)
        elif data.tokenizer_name == "bytes":
            start.check_tokens(data, ByteTokenizer(data.ends_documents))
        if not is_packaged(start.path):
            init_from = absolute(start.name)
    names = ("path", "validation_path", "test_path")
    paths: Any = {name: tuple(map(absolute, getattr(data, name))) for name in names}
    data = replace(data, tokenizer=tokenizer, **paths)
    return replace(config, data=data, train=replace(config.train, init_from=init_from))
