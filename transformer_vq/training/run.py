"""Start and resume training runs: `train` and `resume`.

RUN/history.jsonl has one row per start, resume, extension, finish or stop. Resuming never removes
rows, so the history also shows which steps were trained again.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_vq.config import LEARNED, NEUTRAL_FIELDS, RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.paths import expand_user
from transformer_vq.data.prepare import prepare
from transformer_vq.data.text import store_stdin
from transformer_vq.device import total_memory
from transformer_vq.errors import UserError
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.world import World, join_world
from transformer_vq.progress import Reporter, reporting, warn
from transformer_vq.training.checkpoint import (
    BEST,
    CONFIG,
    CheckpointError,
    Progress,
    TrainingResult,
    load_checkpoint,
    locked,
    original_config,
    read_config,
    read_tokenizer,
    remove_checkpoints_after,
    restore_best,
    write_config,
)
from transformer_vq.training.extension import (
    check_same_run,
    find_checkpoint,
    report_changes,
)
from transformer_vq.training.loading import (
    check_same_architecture,
    check_vocabulary,
    initial_model,
    with_initial_tokenizer,
)
from transformer_vq.training.loop import TrainingLoop
from transformer_vq.training.metrics import NAME as METRICS
from transformer_vq.training.metrics import check_loggers, rewind
from transformer_vq.training.packaged import find_run, is_packaged
from transformer_vq.training.rows import read_rows, write_rows
from transformer_vq.training.run_list import CHECKPOINTS
from transformer_vq.training.sizes import memory_hint, sizes
from transformer_vq.training.step import Trainer

HISTORY = "history.jsonl"
USABLE_MEMORY = 0.7  # fraction of a device's memory that `choose_accumulation` plans with

Event = Literal["start", "resume", "extend", "finish", "stop"]


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
        config = _with_absolute_paths(_with_stored_stdin(config))
        check_mesh(config, world.mesh)
        check_loggers(config)
        check_same_architecture(config)
        config = with_initial_tokenizer(config)
        corpus = _prepare_corpus(config, world)
        check_vocabulary(config, corpus)
        config = replace(config, model=replace(config.model, vocab_size=corpus.vocab_size))
        batches = training_batches(config, corpus)
        config = choose_accumulation(config, memory_per_process(world), world)
        check_memory(config, world)
        if config.optim.schedule == "cosine" and config.optim.warmup >= config.train.steps:
            warn(
                f"--optim.warmup {config.optim.warmup}: the run ends after {config.train.steps} "
                "steps, before the peak learning rate; use a shorter warm-up"
            )
        trainer = _new_trainer(config, world)
        with _locked_by_rank_zero(run, world):
            _check_is_new(run, world)  # another process may have started a run in the meantime
            if world.is_rank_zero:
                write_config(run, config, corpus.tokenizer())
            record(run, "start", 0, world)
            return _run_loop(TrainingLoop(run, config, corpus, batches, trainer))


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
        stored = original_config(run, current)
        config = current if config is None else config
        check_same_run(stored, config, run)
        with join_world(config.parallel, config.train.device) as world:
            return _resume(run, current, stored, config, world, allow_schedule_change)


def train_or_resume(config: RunConfig, run: Path) -> TrainingResult:
    """Start a run, or resume it if the folder already contains one with the same config."""
    if not (run / CONFIG).exists():
        return train(config, run)
    config, stored = _with_absolute_paths(config), read_config(run)
    if not config.train.accumulate:  # chosen when the run was started
        config = replace(config, train=replace(config.train, accumulate=stored.train.accumulate))
    check_same_run(stored, config, run, NEUTRAL_FIELDS)
    return resume(run, config)


def _resume(
    run: Path,
    current: RunConfig,
    stored: RunConfig,
    config: RunConfig,
    world: World,
    allow_schedule_change: bool = False,
) -> TrainingResult:
    """Resume a run with the config `config`; `stored` is its config so far.

    current: the content of config.json, which differs from `stored` if it was edited.
    """
    check_mesh(config, world.mesh)
    check_loggers(config)
    config = choose_accumulation(config, memory_per_process(world), world)
    corpus = _prepare_corpus(config, world)
    batches = training_batches(config, corpus)
    with _locked_by_rank_zero(run, world):
        if world.is_rank_zero and read_config(run) != current:
            raise CheckpointError(f"{run} was changed by another process; resume it again")
        if read_tokenizer(run, current).sha256 != corpus.tokenizer().sha256:
            raise CheckpointError(
                f"the tokenizer of the data is not that of {run}; restore the file that was used "
                "when it was started, or start a new run"
            )
        if corpus.vocab_size != config.model.vocab_size:
            raise CheckpointError(
                f"{run / CONFIG}: model.vocab_size is {config.model.vocab_size}, but the data have "
                f"{corpus.vocab_size} tokens; undo the edit"
            )
        checkpoint, done = None, 0
        if world.is_rank_zero:
            checkpoint, done = find_checkpoint(run, stored, config, allow_schedule_change)
        done = world.from_rank_zero(done)
        step = world.from_rank_zero(0 if checkpoint is None else checkpoint.step)
        if checkpoint is None and step > 0:  # on the other ranks
            checkpoint = load_checkpoint(run, step)
        if checkpoint is None:
            if done == 0:
                warn(f"{run} has no checkpoint yet; starting from the first step")
            trainer, progress = _new_trainer(config, world), Progress()
        else:
            check_same_run(checkpoint.config, config, run)
            if checkpoint.metadata["corpus"] != corpus.sha256:
                raise CheckpointError(
                    f"the data of {run} have changed since it was started; restore them, or start "
                    "a new run"
                )
            trainer = Trainer(checkpoint.model, config, world.device, world)
            trainer.load_tensors(checkpoint.tensors)
            progress = Progress.from_checkpoint(checkpoint)
        changed = stored.differences(config)
        if changed or not progress.is_finished(config):
            report_changes(stored, config, done, step)
            is_longer = config.train.steps > stored.train.steps
            record(run, "extend" if is_longer else "resume", step, world, changed)
        if world.is_rank_zero:
            # In this order, a kill at any point leaves a run that resumes with the old or the new
            # config. A checkpoint of the old decay never meets the new config.
            if step < done:
                remove_checkpoints_after(run, step)
            restore_best(run, checkpoint)
            rewind(run, progress.step, progress.logged_at, progress.validated_at)
            write_config(run, config)
        return _run_loop(TrainingLoop(run, config, corpus, batches, trainer, progress))


def _run_loop(loop: TrainingLoop) -> TrainingResult:
    """Run the training loop and record how it ended."""
    is_finished = loop.is_finished
    result = loop.run()
    if not is_finished:
        event: Event = "finish" if result.finished else "stop"
        record(loop.folder, event, result.step, loop.trainer.world)
    return result


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
    for name in (METRICS, HISTORY, CHECKPOINTS, BEST):
        if (run / name).exists():
            raise CheckpointError(f"{run} contains {name} of something else; use another --out")


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
    is_checked_later = config.train.init_from is not None  # by `check_vocabulary`
    is_learned = config.data.tokenizer_name in LEARNED
    vocab_size = None if is_checked_later and not is_learned else config.model.vocab_size
    with world.local_rank_zero_first():
        return prepare(config.data, vocab_size)


def training_batches(config: RunConfig, corpus: Corpus) -> TrainingBatches:
    """Return the batches of all steps of a run."""
    train = config.train
    return TrainingBatches(
        corpus.split("train"),
        train.batch_size,
        train.seq_len,
        train.backprop_len,
        train.seed,
    )


def _new_trainer(config: RunConfig, world: World) -> Trainer:
    """Return the trainer at the start of a run; all random numbers follow from its seed."""
    torch.manual_seed(config.train.seed)
    return Trainer(initial_model(config), config, world.device, world)


def _with_stored_stdin(config: RunConfig) -> RunConfig:
    """Store data from standard input in the cache, so that the run can be resumed."""
    cache = expand_user(config.data.cache_folder, "--data.cache")
    return replace(config, data=store_stdin(config.data, cache))


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
    init_from = config.train.init_from
    if init_from is not None and not is_packaged(find_run(init_from)):
        init_from = absolute(init_from)
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


def check_memory(config: RunConfig, world: World) -> None:
    """Raise UserError if not even the weights, gradients and optimizer fit into memory."""
    needed = sizes(replace(config, parallel=world.mesh))
    total = total_memory(world.device)
    if needed.fixed_bytes > total:
        raise UserError(
            "out of memory: weights, gradients and optimizer take "
            f"{needed.fixed_bytes / 1e9:,.1f} GB, this device has {total / 1e9:,.1f} GB; "
            f"{memory_hint(config)}"
        )


def memory_per_process(world: World) -> int:
    """Return the bytes of memory for this process; CPU processes of a machine share its memory."""
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.device.type == "cpu" else 1
    return total_memory(world.device) // n


def read_history(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first; an empty list if none are recorded.

    Each row has `time` (ISO 8601, UTC), `event` ("start", "resume", "extend", "finish" or "stop"),
    `step` (completed steps), `changed` (config fields with the old and the new value), `version`,
    `torch`, `device`, `processes` and `command` (None if Python code started the run).
    """
    return read_rows(Path(run) / HISTORY, event=str, step=int)


def record(
    run: Path,
    event: Event,
    step: int,
    world: World,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """Append an event to the history; does nothing on other ranks than 0.

    The file is replaced as a whole, so a crash cannot leave an unfinished line. If it cannot be
    written, warn; training continues.
    """
    if not world.is_rank_zero:
        return
    from transformer_vq import __version__

    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": event,
        "step": step,
        "changed": {name: list(values) for name, values in (changed or {}).items()},
        "version": __version__,
        "torch": str(torch.__version__),
        "device": str(world.device),
        "processes": world.mesh.n_processes,
        "command": _command(),
    }
    try:
        write_rows(run / HISTORY, [*read_history(run), row])
    except OSError as error:
        warn(f"cannot write {run / HISTORY}: {error}")


def _command() -> str | None:
    """Return the command line if the command `tvq` is running, else None."""
    program = Path(sys.argv[0])
    if program.name == "tvq":
        return shlex.join(["tvq", *sys.argv[1:]])
    if program.parts[-2:] == ("transformer_vq", "__main__.py"):
        return shlex.join(["python", "-m", "transformer_vq", *sys.argv[1:]])
    return None
