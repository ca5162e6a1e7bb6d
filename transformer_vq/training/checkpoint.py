"""The files of a run folder: safetensors and JSON, complete or absent, verified, never pickled.

RUN/config.json             the preset with its overrides; may be edited
RUN/manifest.json           digests of config.json and of the tokenizer
RUN/metrics.jsonl           one line per logged step and per validation
RUN/history.jsonl           one line per start, resume, extension, finish and stop
RUN/tokenizer.*             only for corpora with a vocabulary
RUN/checkpoints/step-*/     shard-*.safetensors (one per rank), index.json, training.json,
                            manifest.json
RUN/best/model.safetensors  the model with the lowest validation loss

A checkpoint from which a run can be extended is pinned: it is never removed, and it also contains
best.safetensors, the best model at that step.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from transformer_vq.config import FREE_FIELDS, ModelConfig, RunConfig
from transformer_vq.data.tokenizers import TOKENIZER_FILES, Tokenizer, load_tokenizer
from transformer_vq.device import meta_device
from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    atomic_write,
    changed_files,
    check_manifest,
    lock_folder,
    publish_folder,
    read_json,
    read_manifest,
    read_object,
    remove,
    remove_partial_files,
    write_json,
    write_manifest,
    write_tensors,
)
from transformer_vq.nn.model import TransformerVQ, check_tensors
from transformer_vq.parallel.shards import Index, empty, read_index, read_whole
from transformer_vq.parallel.world import World
from transformer_vq.progress import warn
from transformer_vq.training.packaged import find_run
from transformer_vq.training.run_list import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    METADATA,
    MODEL,
    newest_metadata,
)

TOKENIZER_CONFIG = "tokenizer_config.json"  # of Hugging Face tokenizers
BEST_COPY = "best.safetensors"  # of pinned checkpoints
FORMAT = 4  # version of run folders; increment when older ones can no longer be read

# Fields of a model config that affect its training, but not the function it computes.
TRAINING_FIELDS = {"p_dropsin", "p_dropres", "p_droplyr", "commit_coef", "grad_through_cache"}
TRAINING_FIELDS |= {"ema_decay", "codebook_init", "revive_below"}


class CheckpointError(UserError):
    """A run or checkpoint that does not exist, is corrupt, or is not what was asked for."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run, on disk; see `Trainer.load`."""

    step: int
    """Number of completed steps."""
    folder: Path
    index: Index
    metadata: dict[str, Any]
    """Plain values: the config, the checksum of the corpus, and the progress of the run."""

    @property
    def config(self) -> RunConfig:
        """The config of the run when the checkpoint was written."""
        return RunConfig.from_dict(self.metadata["config"])

    @cached_property
    def model(self) -> TransformerVQ:
        """The whole model; NotFiniteError is raised if a weight or codebook is NaN or infinite."""
        with meta_device():
            model = TransformerVQ(self.config.model)
        tensors = read_whole(self.folder, self.index, "model/")
        check_tensors(self.folder, tensors, model)
        model.load_state_dict(tensors, assign=True)
        return model

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Everything else, also in full; see `Trainer.tensors`."""
        others = {name: x for name, x in self.index.items() if not name.startswith("model/")}
        return read_whole(self.folder, others)


@dataclass
class Progress:
    """The progress of a run, as stored in the metadata of its checkpoints."""

    step: int = 0
    """Number of completed steps."""
    validated_at: int = 0
    """Step of the last validation; 0 before the first one."""
    logged_at: int = 0
    """Step of the last training row in metrics.jsonl; 0 before the first one."""
    best_loss: float | None = None
    """Lowest validation loss, in nats per token; None before the first validation."""
    best_bits_per_byte: float | None = None
    """The same loss in bits per byte."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Progress:
        """Return the progress of a run at a checkpoint."""
        return cls(**{field.name: checkpoint.metadata[field.name] for field in fields(cls)})

    def is_finished(self, config: RunConfig) -> bool:
        """Return whether all steps of a run and its last validation are done."""
        return self.step == self.validated_at == config.train.steps


@dataclass(frozen=True)
class TrainingResult:
    """The result of `train` or `resume`."""

    run: Path
    """The run folder."""
    step: int
    """Number of completed steps."""
    finished: bool
    """Whether all steps and the last validation are done."""
    stopped_by: int | None
    """Number of the signal that stopped the run, on any rank; None if it finished."""
    best_loss: float
    """Lowest validation loss since the start of the run, in nats per token; infinite without."""
    best_bits_per_byte: float = math.inf
    """The same loss in bits per byte; infinite before the first validation."""


def write_config(run: Path, config: RunConfig, tokenizer: Tokenizer | None = None) -> None:
    """Write config.json and the manifest of a run. tokenizer: None if it is already in the run."""
    if tokenizer is not None:
        tokenizer.save(run)
    write_json(run / CONFIG, config.to_dict() | {"format": FORMAT})
    names = (CONFIG, *TOKENIZER_FILES, TOKENIZER_CONFIG)
    write_manifest(run, [name for name in names if (run / name).is_file()])


def read_config(run: Path) -> RunConfig:
    """Return the config of a run; raises CheckpointError if the folder is not a run folder.

    config.json may have been edited; see `original_config`.
    """
    path = run / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder (no {CONFIG})")
    fix = f"undo the edit or restore {CONFIG} from a copy"
    try:
        values = read_object(path)
    except CorruptFileError as error:
        raise CheckpointError(f"{error}; {fix}") from error
    if (found := values.pop("format", 1)) != FORMAT:
        problem = f"{run} was written by another version of transformer_vq"
        formats = f"format {found!r:.20}, this version reads {FORMAT}"
        raise CheckpointError(f"{problem} ({formats}); train it again")
    try:
        return RunConfig.from_dict(values)
    except UserError as error:
        raise CheckpointError(f"{path}: {error}; {fix}") from error


def original_config(run: Path, config: RunConfig) -> RunConfig:
    """Return the config that a run had before config.json was edited, and warn about the edit.

    config: the content of config.json. The original is the copy in the newest checkpoint; without
    a checkpoint it is unknown, and `config` is returned.
    """
    with suppress(CorruptFileError):  # without a manifest, every difference counts as an edit
        if not changed_files(run, [CONFIG]):
            return config
    try:
        original = RunConfig.from_dict(newest_metadata(run)["config"])
    except (UserError, LookupError, TypeError):
        warn(f"{run / CONFIG} was edited")
        return config
    if changed := original.differences(config):
        named = ", ".join(f"{name} ({old} -> {new})" for name, (old, new) in changed.items())
        warn(f"{run / CONFIG} was edited: {named}")
    return original


def read_tokenizer(run: Path, config: RunConfig | None = None) -> Tokenizer:
    """Return the tokenizer of a run; raises CheckpointError if it has changed.

    config: of the run, if it has been read already.
    """
    config = read_config(run) if config is None else config
    fix = "restore it from a copy"
    try:
        check_manifest(run, fix, [name for name in read_manifest(run) if name != CONFIG])
    except CorruptFileError as error:
        message = str(error)
        raise CheckpointError(message if fix in message else f"{message}; {fix}") from error
    return load_tokenizer(run, None, config.data.ends_documents)


@contextmanager
def locked(run: Path, is_rank_zero: bool = True) -> Iterator[None]:
    """Create and lock a run folder, so that only one process at a time writes to it.

    Other ranks than rank 0 do nothing. Raises CheckpointError if another process holds the lock,
    which ends with that process. Temporary files of killed processes are removed.
    """
    if not is_rank_zero:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    error = CheckpointError(f"{run} is in use by another process; wait for it or stop it")
    with lock_folder(run, error):
        for folder in (run, run / CHECKPOINTS, run / BEST):
            remove_partial_files(folder)
        yield


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints in ascending order, including corrupt ones."""
    names = [folder.name for folder in (run / CHECKPOINTS).glob("step-*") if folder.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def save_checkpoint(
    run: Path,
    step: int,
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    keep: int,
    pinned: int | None = None,
    group: ProcessGroup | None = None,
    in_background: bool = False,
) -> Callable[[], None]:
    """Write a checkpoint, then remove all but the newest `keep`.

    tensors: as of `Trainer.tensors`. pinned: step of a checkpoint that is kept as well, with a copy
    of the best model so far. group: of all ranks, each of which writes its shards. in_background:
    return when the tensors are copied.
    Returns a function that waits for the end of the writing. Both raise OSError if the checkpoint
    cannot be written, for example on a full disk. Older checkpoints are then kept.
    """
    from transformer_vq.parallel.storage import save_shards  # takes a second to import

    folder, best = checkpoint_folder(run, step), run / BEST / MODEL
    metadata = metadata | {"format": FORMAT, "step": step}

    def publish(partial: Path, digests: dict[str, str]) -> None:
        if step == pinned and best.is_file():
            shutil.copyfile(best, partial / BEST_COPY)
        write_json(partial / METADATA, metadata)
        write_manifest(partial, known=digests)
        if folder.exists():  # a corrupt checkpoint, if the run was resumed from an older one
            shutil.rmtree(folder)
        publish_folder(partial, folder)
        for old in [old for old in checkpoint_steps(run) if old != pinned][:-keep]:
            if old < step:
                shutil.rmtree(checkpoint_folder(run, old), ignore_errors=True)

    return save_shards(folder, tensors, publish, group, in_background)


def save_best(
    run: Path, model: dict[str, Tensor], metadata: dict[str, str], group: ProcessGroup | None
) -> None:
    """Write RUN/best, one file with full tensors; every rank writes its shards first.

    So no rank needs the memory for more than one full tensor. Raises OSError.
    """
    from transformer_vq.parallel.storage import save_shards

    best = run / BEST / MODEL

    def publish(partial: Path, digests: dict[str, str]) -> None:
        index = read_index(partial)
        tensors = {name: empty(entry, "meta") for name, entry in index.items()}
        best.parent.mkdir(exist_ok=True)
        write_tensors(
            best, tensors, metadata, lambda name: read_whole(partial, {name: index[name]})[name]
        )
        remove(partial)

    save_shards(best.with_suffix(""), model, publish, group)


def load_checkpoint(run: Path, step: int, world: World | None = None) -> Checkpoint:
    """Return the checkpoint of a step; raises CheckpointError if it is missing or corrupt.

    world: of all ranks that call this together. Each verifies some of the files.
    """
    folder = checkpoint_folder(run, step)
    world, failure = world or World(), None
    try:
        names = sorted(read_manifest(folder))
        check_manifest(folder, names=names[world.global_rank :: world.mesh.n_processes])
        metadata, index = read_json(folder / METADATA), read_index(folder)
        if metadata["format"] != FORMAT:
            raise CheckpointError(f"{folder} was written by another version of transformer_vq")
        if metadata["step"] != step:
            raise CheckpointError(f"{folder} holds step {metadata['step']}; was it renamed?")
    except UserError as error:
        failure = error
    if world.any(failure is not None):
        reason = failure or f"{folder} is corrupt; another rank reports why"
        raise CheckpointError(str(reason)) from failure
    return Checkpoint(step, folder, index, metadata)


def newest_checkpoint(
    run: Path,
    world: World | None = None,
    check: Callable[[Checkpoint], object] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Return the newest valid checkpoint, and warn about newer ones that are corrupt.

    Returns None if the run has no checkpoint yet; raises CheckpointError if all are corrupt.
    world: of all ranks that call this together; rank 0 lists the checkpoints. check: may raise
    UserError to reject a checkpoint.
    """
    steps = checkpoint_steps(run)
    world = world or World()
    n_steps = world.from_rank_zero(len(steps))
    for i in range(n_steps):
        step = world.from_rank_zero(steps[-1 - i] if i < len(steps) else 0)
        try:
            checkpoint = load_checkpoint(run, step, world)
            check(checkpoint)
            return checkpoint
        except UserError as error:
            warn(f"{error}; trying the checkpoint before it")
    if n_steps:
        problem = f"all {n_steps} checkpoints of {run} are corrupt"
        raise CheckpointError(f"{problem}; restore one from a copy, or start a new run")
    return None


def restore_best(run: Path, checkpoint: Checkpoint | None) -> None:
    """Make RUN/best the best model at a checkpoint, as far as the checkpoint determines it.

    checkpoint: None for the start of a run.
    """
    best = run / BEST / MODEL
    if checkpoint is None or checkpoint.metadata["best_loss"] is None:
        best.unlink(missing_ok=True)
    elif (copy := checkpoint.folder / BEST_COPY).is_file():
        best.parent.mkdir(exist_ok=True)
        with atomic_write(best) as partial:
            shutil.copyfile(copy, partial)


def remove_checkpoints_after(run: Path, step: int) -> None:
    """Remove all checkpoints of later steps, the newest first."""
    for later in reversed(checkpoint_steps(run)):
        if later > step:
            shutil.rmtree(checkpoint_folder(run, later))


def load_model(
    run: Path, which: str = "best", config: RunConfig | None = None
) -> tuple[TransformerVQ, str]:
    """Return a model of a run and its description ("best" or "step N").

    which: "best", "last" or the number of a step. "best" selects the last checkpoint if the run has
    not been validated yet. run: may also be a model file, which is described by its name.
    config: of the run, if it has been read already.
    """
    if run.is_file():
        return TransformerVQ.load(run), run.name
    config = read_config(run) if config is None else config
    original = original_config(run, config)
    best = run / BEST / MODEL
    if which == "best" and best.is_file():
        try:
            model = TransformerVQ.load(best)
        except CorruptFileError as error:
            raise CheckpointError(f"{error}; use --checkpoint last") from error
        _check_fits(run, config, model, best)
        return model.float(), "best"  # packaged models are stored in bf16
    steps = checkpoint_steps(run)
    if which in ("best", "last"):
        checkpoint = newest_checkpoint(run, check=lambda checkpoint: checkpoint.model)
        if checkpoint is None:
            raise CheckpointError(f"{run} has no checkpoint yet; continue with `tvq resume {run}`")
        if which == "best" and checkpoint.metadata["best_loss"] is not None:
            raise CheckpointError(f"{best} is missing; use --checkpoint last")
    elif which.isdecimal() and int(which) in steps:
        try:
            checkpoint = load_checkpoint(run, int(which))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; choose another checkpoint of {steps}") from error
    else:
        fix = f"choose best, last or one of {steps}"
        raise CheckpointError(f"{run} has no checkpoint {which!r}; {fix}")
    if other := sorted(checkpoint.config.differences(original).keys() - FREE_FIELDS):
        problem = f"{checkpoint.folder} is a checkpoint of another run"
        raise CheckpointError(f"{problem}: {', '.join(other)} differ; delete it")
    _check_fits(run, config, checkpoint.model, checkpoint.folder)
    return checkpoint.model, f"step {checkpoint.step}"


def _check_fits(run: Path, config: RunConfig, model: TransformerVQ, path: Path) -> None:
    """Raise CheckpointError if config.json describes another function than a saved model."""
    named = [
        f"model.{name} is {own}, in the config {wanted}"
        for name, own, wanted in differences(model.config, config.model)
        if name not in TRAINING_FIELDS
    ]
    if named:
        problem = f"{path} does not fit {run / CONFIG}: {', '.join(named)}"
        raise CheckpointError(f"{problem}; undo the edit of the config, or restore the model")


def differences(one: ModelConfig, other: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return the fields that differ, with both values."""
    values = asdict(other)
    return [(name, x, values[name]) for name, x in asdict(one).items() if x != values[name]]


class LoadedRun(NamedTuple):
    """A trained model with its tokenizer and config."""

    model: TransformerVQ
    tokenizer: Tokenizer
    config: RunConfig


def load_run(
    path: str | os.PathLike[str], checkpoint: str = "best", device: torch.device | str = "cpu"
) -> LoadedRun:
    """Load the model, tokenizer and config of a run folder, or of a packaged model by its name.

    checkpoint: "best" (lowest validation loss), "last" or the number of a step. device: where the
    model is moved to. The model is in evaluation mode. Raises CheckpointError if `path` is not a
    run folder or the checkpoint does not exist or is corrupt.

        model, tokenizer, config = load_run("runs/tiny")
        print(generate_text(model, tokenizer, "import ", max_new_tokens=50))
    """
    run = find_run(path)
    config = read_config(run)
    model, _ = load_model(run, checkpoint, config)
    tokenizer = read_tokenizer(run, config)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise CheckpointError(
            f"{run}: the model has {model.config.vocab_size} tokens, the tokenizer "
            f"{tokenizer.vocab_size}; check that {' or '.join(TOKENIZER_FILES)} is not missing"
        )
    return LoadedRun(model.to(device).eval(), tokenizer, config)
