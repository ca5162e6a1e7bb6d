"""What a run keeps on disk: safetensors and JSON, written whole or not at all, never pickled.

RUN/config.json            the preset with its overrides
RUN/metrics.jsonl          a line per logged update and per validation
RUN/tokenizer.model        for corpora with a vocabulary of their own
RUN/checkpoints/step-*/    model.safetensors, training.safetensors, training.json
RUN/best/model.safetensors the model with the lowest validation loss
"""

from __future__ import annotations

import fcntl
import json
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_vq.config import RunConfig
from transformer_vq.files import folder_written_whole, write_json, write_tensors
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.ops.cache import CacheStats
from transformer_vq.ops.state import AttentionState
from transformer_vq.progress import warn

MODEL, TENSORS, FACTS = "model.safetensors", "training.safetensors", "training.json"


class CheckpointError(ValueError):
    """A run or checkpoint that is not there, not whole, or not what was asked for."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that is needed to go on: the model, other tensors, plain facts."""

    step: int
    model: TransformerVQ
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def read_config(run: Path) -> RunConfig:
    """The config of a run."""
    path = run / "config.json"
    try:
        return RunConfig.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{run} holds no run: there is no config.json in it") from None
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Only one process at a time works on a run; the lock goes with the process."""
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{run} is being worked on by another process") from None
        yield


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of all checkpoints of a run, whole or not, the oldest first."""
    names = [folder.name for folder in (run / "checkpoints").glob("step-*") if folder.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`.

    Raises OSError if it cannot be written, for a full disk say; those before are then untouched.
    """
    folder = checkpoint_folder(run, checkpoint.step)
    with folder_written_whole(folder) as partial:
        checkpoint.model.save(partial / MODEL)
        write_tensors(partial / TENSORS, checkpoint.tensors)
        sums = {name: _checksum(partial / name) for name in (MODEL, TENSORS)}
        write_json(partial / FACTS, checkpoint.facts | {"step": checkpoint.step, "checksums": sums})
        if folder.exists():  # one that could not be read, or another attempt at the same step
            shutil.rmtree(folder)
    for step in checkpoint_steps(run)[:-keep]:
        if step < checkpoint.step:
            shutil.rmtree(checkpoint_folder(run, step), ignore_errors=True)
    return folder


def load_checkpoint(run: Path, step: int) -> Checkpoint:
    """One checkpoint of a run; raises CheckpointError unless all of it is as it was written."""
    folder = checkpoint_folder(run, step)
    try:
        facts = json.loads((folder / FACTS).read_text())
        for name, checksum in facts["checksums"].items():
            if _checksum(folder / name) != checksum:
                raise CheckpointError(f"{folder / name} is damaged: its checksum is wrong")
        model = TransformerVQ.load(folder / MODEL)
        return Checkpoint(facts["step"], model, load_file(folder / TENSORS), facts)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; says so if a newer one is not. None if there is none."""
    steps = checkpoint_steps(run)
    for step in reversed(steps):
        try:
            return load_checkpoint(run, step)
        except CheckpointError as error:
            warn(f"{error}; looking for an older checkpoint")
    if steps:
        raise CheckpointError(f"{run} has {len(steps)} checkpoints and none of them can be read")
    return None


def load_model(run: Path, which: str = "best") -> tuple[TransformerVQ, str]:
    """A model of a run, and which one it is: `best`, `last`, or the number of a step.

    `best` takes the last if no validation has been done yet. A model file may be given as well.
    """
    if run.is_file():
        return TransformerVQ.load(run), run.name
    read_config(run)
    if which == "best" and (run / "best" / MODEL).is_file():
        return TransformerVQ.load(run / "best" / MODEL), "best"
    if which in ("best", "last"):
        newest = newest_checkpoint(run)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet")
        return newest.model, f"step {newest.step}"
    steps = checkpoint_steps(run)
    if not which.isdigit() or int(which) not in steps:
        raise CheckpointError(
            f"{run} has no checkpoint {which!r}; choose best, last or one of {steps}"
        )
    return load_checkpoint(run, int(which)).model, f"step {which}"


def state_to_tensors(state: ModelState, prefix: str = "state") -> dict[str, Tensor]:
    """The tensors of a state under their names, for a safetensors file."""
    return _flatten(state, prefix)


def state_from_tensors(tensors: dict[str, Tensor], prefix: str = "state") -> ModelState:
    """What `state_to_tensors` made."""
    start = f"{prefix}/"
    tree = _nest({k.removeprefix(start): x for k, x in tensors.items() if k.startswith(start)})
    layers = tree["layers"]
    return ModelState(
        tuple(_attention_state(layers[str(i)]) for i in range(len(layers))), tree.get("branch_keep")
    )


def _attention_state(parts: dict[str, Any]) -> AttentionState:
    cache = parts.get("cache")
    return AttentionState(**{**parts, "cache": None if cache is None else CacheStats(**cache)})


def _flatten(tree: Any, name: str) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {name: tree}
    if isinstance(tree, tuple):
        items = [(str(i), item) for i, item in enumerate(tree)]
    elif is_dataclass(tree):
        items = [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    else:
        return {}
    return {k: x for key, item in items for k, x in _flatten(item, f"{name}/{key}").items()}


def _nest(tensors: dict[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in tensors.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = x
    return tree


def _checksum(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            crc = zlib.crc32(data, crc)
    return f"{path.stat().st_size}-{crc:08x}"
