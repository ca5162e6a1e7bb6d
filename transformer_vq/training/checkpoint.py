"""The files of a run folder: safetensors and JSON, complete or absent, verified, never pickled.

RUN/config.json             the preset with its overrides
RUN/metrics.jsonl           one line per logged step and per validation
RUN/history.jsonl           one line per start, resume, extension, finish and stop
RUN/tokenizer.model         only for corpora with a learned vocabulary
RUN/checkpoints/step-*/     model.safetensors, training.safetensors, training.json
RUN/best/model.safetensors  the model with the lowest validation loss

A checkpoint from which a run can be extended is pinned: it is never removed, and it also contains
best.safetensors, the best model at that step.
"""

from __future__ import annotations

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
from transformer_vq.config.run import FREE_FIELDS
from transformer_vq.data.tokenizers import Tokenizer, load_tokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    atomic_folder,
    atomic_write,
    file_digest,
    lock_folder,
    read_json,
    read_tensors,
    read_verified_json,
    remove_partial_files,
    write_tensors,
    write_verified_json,
)
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import warn
from transformer_vq.training.packaged import find_run
from transformer_vq.training.run_list import read_config_values

CONFIG, BEST = "config.json", "best"
MODEL, TENSORS, METADATA = "model.safetensors", "training.safetensors", "training.json"
BEST_COPY = "best.safetensors"  # of pinned checkpoints
FORMAT = 2  # version of run folders; increment when older ones can no longer be read


class CheckpointError(UserError):
    """A run or checkpoint that does not exist, is corrupt, or is not what was asked for."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run."""

    step: int
    """Number of completed steps."""
    model: TransformerVQ
    tensors: dict[str, Tensor]
    """The optimizer, the carried states and the RNG state, as in `Trainer.tensors`."""
    metadata: dict[str, Any]
    """Plain values: the config, the checksum of the corpus, and the progress of the run."""

    @property
    def config(self) -> RunConfig:
        """The config of the run when the checkpoint was written."""
        return RunConfig.from_stored(self.metadata["config"])


def write_config(run: Path, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Write config.json: the config of a run and the checksum of its tokenizer."""
    about = {"format": FORMAT, "tokenizer_sha256": getattr(tokenizer, "sha256", None)}
    write_verified_json(run / CONFIG, config.to_dict() | about)


def read_config(run: Path) -> RunConfig:
    """Return the config of a run; raises CheckpointError if the folder is not a run folder."""
    values = _read_config(run)
    del values["format"], values["tokenizer_sha256"]
    return RunConfig.from_stored(values)


def read_tokenizer(run: Path) -> Tokenizer:
    """Return the tokenizer of a run; raises an error if its checksum does not match."""
    ends_documents = read_config(run).data.ends_documents
    return load_tokenizer(run, _read_config(run)["tokenizer_sha256"], ends_documents)


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
        return read_config_values(run)
    except CorruptFileError as error:
        raise CheckpointError(
            f"{error}; restore it from a copy, or start a new run (`tvq train`)"
        ) from error
    except UserError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a run folder, so that only one process at a time writes to it.

    Raises CheckpointError if another process holds the lock, which ends with that process.
    Temporary files of killed processes are removed.
    """
    error = CheckpointError(f"{run} is in use by another process; wait for it or stop it")
    with lock_folder(run, error):
        for folder in (run, run / "checkpoints", run / BEST):
            remove_partial_files(folder)
        yield


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints in ascending order, including corrupt ones."""
    names = [folder.name for folder in (run / "checkpoints").glob("step-*") if folder.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def save_checkpoint(
    run: Path, checkpoint: Checkpoint, keep: int, pinned: int | None = None
) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`; return its folder.

    pinned: step of a checkpoint that is kept as well, with a copy of the best model so far.
    Raises OSError if it cannot be written, for example on a full disk. Older checkpoints are then
    kept.
    """
    folder, best = checkpoint_folder(run, checkpoint.step), run / BEST / MODEL
    with atomic_folder(folder) as partial:
        digests = {
            MODEL: checkpoint.model.save(partial / MODEL),
            TENSORS: write_tensors(partial / TENSORS, checkpoint.tensors),
        }
        if checkpoint.step == pinned and best.is_file():
            shutil.copyfile(best, partial / BEST_COPY)
            digests[BEST_COPY] = file_digest(partial / BEST_COPY)
        about = {"format": FORMAT, "step": checkpoint.step, "digests": digests}
        write_verified_json(partial / METADATA, checkpoint.metadata | about)
        # A corrupt checkpoint of the same step, for example after resuming from an older one.
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    for step in [step for step in checkpoint_steps(run) if step != pinned][:-keep]:
        if step < checkpoint.step:
            shutil.rmtree(checkpoint_folder(run, step), ignore_errors=True)
    return folder


def load_checkpoint(run: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a step; raises CheckpointError if it is missing or corrupt."""
    folder = checkpoint_folder(run, step)
    try:
        metadata = read_verified_json(folder / METADATA)
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{folder} was written by another version of transformer_vq")
        if metadata["step"] != step:
            raise CheckpointError(f"{folder} holds step {metadata['step']}; was it renamed?")
        model = TransformerVQ.load(folder / MODEL, digest=metadata["digests"][MODEL])
        tensors, _ = read_tensors(folder / TENSORS, metadata["digests"][TENSORS])
        best = metadata["digests"].get(BEST_COPY)
        if best is not None and file_digest(folder / BEST_COPY) != best:
            raise CheckpointError(f"{folder / BEST_COPY} is corrupt: its checksum does not match")
    except CorruptFileError as error:
        raise CheckpointError(str(error)) from error
    return Checkpoint(step, model, tensors, metadata)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, and warn about newer ones that are corrupt.

    Returns None if the run has no checkpoint yet; raises CheckpointError if all are corrupt.
    """
    steps = checkpoint_steps(run)
    for step in reversed(steps):
        try:
            return load_checkpoint(run, step)
        except UserError as error:
            warn(f"{error}; trying the checkpoint before it")
    if steps:
        raise CheckpointError(
            f"all {len(steps)} checkpoints of {run} are corrupt; restore one from a copy, or start "
            "a new run"
        )
    return None


def restore_best(run: Path, checkpoint: Checkpoint | None) -> None:
    """Make RUN/best the best model at a checkpoint, as far as the checkpoint determines it.

    checkpoint: None for the start of a run.
    """
    best = run / BEST / MODEL
    if checkpoint is None or checkpoint.metadata["best_loss"] is None:
        best.unlink(missing_ok=True)
    elif BEST_COPY in checkpoint.metadata["digests"]:
        best.parent.mkdir(exist_ok=True)
        with atomic_write(best) as partial:
            shutil.copyfile(checkpoint_folder(run, checkpoint.step) / BEST_COPY, partial)


def remove_checkpoints_after(run: Path, step: int) -> None:
    """Remove all checkpoints of later steps, the newest first."""
    for later in reversed(checkpoint_steps(run)):
        if later > step:
            shutil.rmtree(checkpoint_folder(run, later))


def load_model(run: Path, which: str = "best") -> tuple[TransformerVQ, str]:
    """Return a model of a run and its description ("best" or "step N").

    which: "best", "last" or the number of a step. "best" selects the last checkpoint if the run has
    not been validated yet. run: may also be a model file, which is described by its name.
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
        return model.float(), "best"  # packaged models are stored in bf16
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
    changed = checkpoint.config.differences(config).keys()
    if other := sorted(changed - FREE_FIELDS):
        raise CheckpointError(
            f"{checkpoint_folder(run, checkpoint.step)} is a checkpoint of another run: "
            f"{', '.join(other)} differ; delete it"
        )


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
    model, _ = load_model(run, checkpoint)
    return LoadedRun(model.to(device).eval(), read_tokenizer(run), config)
