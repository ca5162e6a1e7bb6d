"""What a run keeps on disk: safetensors and JSON, complete or absent, verified, never pickled.

RUN/config.json            the preset with its overrides
RUN/metrics.jsonl          a line per logged update and per validation
RUN/tokenizer.model        for corpora with a vocabulary of their own
RUN/checkpoints/step-*/    model.safetensors, training.safetensors, training.json
RUN/best/model.safetensors the model with the lowest validation loss
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_vq.config import RunConfig
from transformer_vq.data.tokenizers import Tokenizer, load_tokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    atomic_folder,
    read_json,
    read_tensors,
    read_verified_json,
    remove_partial_files,
    write_tensors,
    write_verified_json,
)
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import warn

CONFIG, BEST = "config.json", "best"
MODEL, TENSORS, METADATA = "model.safetensors", "training.safetensors", "training.json"
FORMAT = 2  # of run folders; raised whenever older ones can no longer be read


# What may change when a run is resumed without making it another one. The device and the settings
# of execution may change the last bits of a step; the others change nothing.
FREE_FIELDS = {
    *("data.path", "data.cache", "train.device", "train.compile"),
    *("train.reduction", "train.checkpoint_activations"),
    *("train.log_every", "train.eval_every", "train.eval_tokens", "train.save_every"),
    *("train.keep", "train.tensorboard", "train.wandb"),
    *("parallel.dp", "parallel.fsdp", "parallel.cp", "parallel.tp"),
}


class CheckpointError(UserError):
    """A run or checkpoint that does not exist, is corrupt, or is not what was asked for."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that is needed to go on: the model, other tensors, plain metadata."""

    step: int
    model: TransformerVQ
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def write_config(run: Path, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Write the config of a run, and which tokenizer belongs to it."""
    about = {"format": FORMAT, "tokenizer_sha256": getattr(tokenizer, "sha256", None)}
    write_verified_json(run / CONFIG, config.to_dict() | about)


def read_config(run: Path) -> RunConfig:
    """Return the config of a run; raises CheckpointError if the folder does not hold one."""
    values = _read_config(run)
    del values["format"], values["tokenizer_sha256"]
    return RunConfig.from_dict(values)


def read_tokenizer(run: Path) -> Tokenizer:
    """Return the tokenizer of a run, verified."""
    return load_tokenizer(run, _read_config(run)["tokenizer_sha256"])


def _read_config(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder (no {CONFIG})")
    values = read_json(path)
    if isinstance(values, dict) and "model" in values and values.get("format") != FORMAT:
        raise CheckpointError(
            f"{run} was written by another version of transformer_vq (format "
            f"{values.get('format', 1)!r:.20}, this version reads {FORMAT}); train it again"
        )
    try:
        return read_verified_json(path)
    except CorruptFileError as error:
        raise CheckpointError(
            f"{error}; restore it from a copy, or start a new run (`tvq train`)"
        ) from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Let only one process at a time work on a run; the lock ends with the process.

    What killed processes have left behind is removed.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
    with open(os.open(run / ".lock", flags, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{run} is in use by another process; wait for it or stop it"
            ) from None
        for folder in (run, run / "checkpoints", run / BEST):
            remove_partial_files(folder)
        yield


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of all checkpoints of a run, whole or not, the oldest first."""
    names = [folder.name for folder in (run / "checkpoints").glob("step-*") if folder.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`.

    Raises OSError if it cannot be written, for a full disk say; those before are then untouched.
    """
    folder = checkpoint_folder(run, checkpoint.step)
    with atomic_folder(folder) as partial:
        digests = {
            MODEL: checkpoint.model.save(partial / MODEL),
            TENSORS: write_tensors(partial / TENSORS, checkpoint.tensors),
        }
        about = {"format": FORMAT, "step": checkpoint.step, "digests": digests}
        write_verified_json(partial / METADATA, checkpoint.metadata | about)
        # One that could not be read, or another attempt at the same step.
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    for step in checkpoint_steps(run)[:-keep]:
        if step < checkpoint.step:
            shutil.rmtree(checkpoint_folder(run, step), ignore_errors=True)
    return folder


def load_checkpoint(run: Path, step: int) -> Checkpoint:
    """Return one checkpoint; raises CheckpointError unless all of it is as it was written."""
    folder = checkpoint_folder(run, step)
    try:
        metadata = read_verified_json(folder / METADATA)
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{folder} was written by another version of transformer_vq")
        if metadata["step"] != step:
            raise CheckpointError(f"{folder} holds step {metadata['step']}; was it renamed?")
        model = TransformerVQ.load(folder / MODEL, digest=metadata["digests"][MODEL])
        tensors, _ = read_tensors(folder / TENSORS, metadata["digests"][TENSORS])
    except CorruptFileError as error:
        raise CheckpointError(str(error)) from error
    return Checkpoint(step, model, tensors, metadata)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest checkpoint that can be used, with a warning for every newer one.

    None if there is not one yet; raises CheckpointError if all are damaged.
    """
    steps = checkpoint_steps(run)
    for step in reversed(steps):
        try:
            return load_checkpoint(run, step)
        except CheckpointError as error:
            warn(f"{error}; trying the checkpoint before it")
    if steps:
        raise CheckpointError(
            f"all {len(steps)} checkpoints of {run} are corrupt; restore one from a copy, or start "
            "a new run"
        )
    return None


def load_model(run: Path, which: str = "best") -> tuple[TransformerVQ, str]:
    """A model of a run, and which one it is: `best`, `last`, or the number of a step.

    `best` takes the last if no validation has been done yet. A model file may be given as well.
    """
    if run.is_file():
        return TransformerVQ.load(run), run.name
    config = read_config(run)
    best = run / BEST / MODEL
    if which == "best" and best.is_file():
        try:
            model = TransformerVQ.load(best)
        except CorruptFileError as error:
            raise CheckpointError(f"{error}; use --checkpoint last") from error
        if model.config != config.model:
            raise CheckpointError(f"{best} is not a model of this run; use --checkpoint last")
        return model, "best"
    if which in ("best", "last"):
        newest = newest_checkpoint(run)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet; continue with `tvq resume {run}`")
        if which == "best" and newest.metadata["best_loss"] is not None:
            raise CheckpointError(f"{best} is missing; use --checkpoint last")
        _check_owner(run, config, newest)
        return newest.model, f"step {newest.step}"
    steps = checkpoint_steps(run)
    if not which.isdecimal() or int(which) not in steps:
        raise CheckpointError(
            f"{run} has no checkpoint {which!r}; choose best, last or one of {steps}"
        )
    checkpoint = load_checkpoint(run, int(which))
    _check_owner(run, config, checkpoint)
    return checkpoint.model, f"step {which}"


def _check_owner(run: Path, config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint was copied from another run."""
    changed = RunConfig.from_dict(checkpoint.metadata["config"]).differences(config).keys()
    if other := sorted(changed - FREE_FIELDS):
        raise CheckpointError(
            f"{checkpoint_folder(run, checkpoint.step)} is a checkpoint of another run: "
            f"{', '.join(other)} differ; delete it"
        )


class LoadedRun(NamedTuple):
    """Everything needed to use a trained model."""

    model: TransformerVQ
    tokenizer: Tokenizer
    config: RunConfig


def load_run(
    path: str | os.PathLike[str], checkpoint: str = "best", device: torch.device | str = "cpu"
) -> LoadedRun:
    """Load the model, tokenizer and config of a run folder; the model is in evaluation mode.

    checkpoint: best, last or a step.
    """
    run = Path(path)
    model, _ = load_model(run, checkpoint)
    return LoadedRun(model.to(device).eval(), read_tokenizer(run), read_config(run))
