"""Snapshots: save a context to one file, so that a long document is read once and queried often."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from transformer_vq.errors import UserError
from transformer_vq.files import CorruptFileError, read_tensors, tensors_digest, write_tensors
from transformer_vq.generation.prefill import Context
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.state import ModelState


class SnapshotError(UserError):
    """A snapshot that is corrupt or belongs to another model."""


class Snapshots:
    """Saves and loads contexts of one model, whose identity is computed once.

    The model must not change meanwhile.
    """

    def __init__(self, model: TransformerVQ) -> None:
        self._model = model
        self.identity = _identity(model)

    def save(self, path: Path, context: Context) -> None:
        """Write logits, state and the identity of the model to one file, atomically."""
        tensors = {"logits": context.logits} | context.state.to_tensors()
        write_tensors(path, tensors, self.identity)

    def load(self, path: Path) -> Context:
        """Load a context; raise SnapshotError for other files, and for those of other models."""
        try:
            tensors, metadata = read_tensors(path)
        except CorruptFileError as error:
            raise SnapshotError(f"{error}; write the snapshot again with --save-state") from error
        if "logits" not in tensors or "config" not in metadata:
            raise SnapshotError(f"{path} is not a snapshot; write one with --save-state")
        for part, value in self.identity.items():
            if metadata.get(part) != value:
                raise SnapshotError(
                    f"{path} was written by another model ({part} differ); write it again with "
                    "--save-state"
                )
        _check(path, tensors, self._model)
        device = next(self._model.parameters()).device
        state = ModelState.from_tensors(tensors).to(device)
        return Context(tensors["logits"].to(device), state)


def save_context(path: str | os.PathLike[str], model: TransformerVQ, context: Context) -> None:
    """Write logits, state and the identity of the model to one safetensors file, atomically."""
    Snapshots(model).save(Path(path), context)


def load_context(path: str | os.PathLike[str], model: TransformerVQ) -> Context:
    """Load the context that `save_context` wrote; reject files from another model."""
    return Snapshots(model).load(Path(path))


def _check(path: Path, tensors: dict[str, Tensor], model: TransformerVQ) -> None:
    """Raise SnapshotError unless these are the tensors of a state of this model."""
    n_rows = len(tensors["logits"]) if tensors["logits"].ndim == 2 else 0
    wanted = model.init_state(max(n_rows, 1)).to_tensors()
    wanted["logits"] = torch.empty(max(n_rows, 1), model.config.vocab_size)
    optional = {name for name in tensors if name.endswith("/document")}
    if wrong := (wanted.keys() ^ tensors.keys()) - optional:
        raise SnapshotError(f"{path} is not a snapshot: {min(wrong)} is missing or unknown")
    grows = model.config.attention == "full"  # by one key and value per token
    for name, x in tensors.items():
        if name in optional:
            fits = x.shape == (n_rows,)
        else:
            want = list(wanted[name].shape)
            if grows and name.endswith(("/k", "/v")) and x.ndim == len(want):
                want[2] = x.shape[2]
            same_kind = x.is_floating_point() == wanted[name].is_floating_point()
            fits = list(x.shape) == want and same_kind
        if not fits:
            raise SnapshotError(
                f"{path} is not a snapshot of this model: {name} is {x.dtype} {list(x.shape)}"
            )
        limit = model.config.n_code if name.endswith("/z") else math.inf
        is_possible = x.isfinite() if x.is_floating_point() else (x >= 0) & (x < limit)
        if not is_possible.all():
            raise SnapshotError(f"{path} has invalid values in {name}")


def _identity(model: TransformerVQ) -> dict[str, str]:
    """Return what must match for a state to be usable, part by part."""
    codebooks = {name: x for name, x in model.named_buffers() if ".c_" in name}
    return {
        "config": json.dumps(asdict(model.config), sort_keys=True),
        "weights": tensors_digest(dict(model.named_parameters())),
        "codebooks": tensors_digest(codebooks),
    }
