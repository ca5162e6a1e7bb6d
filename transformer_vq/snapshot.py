"""What a model has read, as one safetensors file: a long document is read once and asked often."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.checkpoint import CheckpointError, state_from_tensors, state_to_tensors
from transformer_vq.files import write_tensors
from transformer_vq.generate import Context
from transformer_vq.nn.model import TransformerVQ


def save_context(path: Path, model: TransformerVQ, context: Context) -> None:
    """Write logits and state, and which model they belong to, atomically."""
    tensors = {"logits": context.logits} | state_to_tensors(context.state)
    write_tensors(path, tensors, _identity(model))


def load_context(path: Path, model: TransformerVQ) -> Context:
    """What `save_context` wrote; raises CheckpointError if it is of another model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no snapshot {path}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole snapshot: {error}") from error
    if "logits" not in tensors or "config" not in metadata:
        raise CheckpointError(f"{path} is no snapshot of a state")
    for part, value in _identity(model).items():
        if metadata.get(part) != value:
            raise CheckpointError(f"{path} was read by another model: its {part} differ")
    device = next(model.parameters()).device
    state = state_from_tensors(tensors).to(device)
    return Context(tensors["logits"].to(device), state)


def _identity(model: TransformerVQ) -> dict[str, str]:
    """What must be the same for a state to be of use, part by part."""
    codebooks = {name: x for name, x in model.named_buffers() if ".c_" in name}
    return {
        "config": json.dumps(asdict(model.config), sort_keys=True),
        "weights": _digest(dict(model.named_parameters())),
        "codebooks": _digest(codebooks),
    }


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous().flatten()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.view(torch.uint8).numpy().data)
    return digest.hexdigest()
