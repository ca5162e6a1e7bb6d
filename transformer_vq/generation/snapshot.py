"""Snapshots: save a context to one file, so that a long document is read once and queried often."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from transformer_vq import files
from transformer_vq.errors import UserError
from transformer_vq.generation.prefill import Context
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.decode import are_codewords

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"}
DTYPES |= {torch.bfloat16: "BF16", torch.int64: "I64"}  # names in safetensors files
MAX_TOKENS = 2**48  # of a document, so that counts never overflow
MAX_VALUE = 1e9  # far above any logit or value; squares of such numbers do not overflow


class SnapshotError(UserError):
    """A snapshot that is corrupt or belongs to another model."""


class Snapshots:
    """Saves and loads contexts of one model, whose identity is computed once.

    The model must not change meanwhile.
    """

    def __init__(self, model: TransformerVQ) -> None:
        self._model = model
        codebooks = {name: x for name, x in model.named_buffers() if ".c_" in name}
        self.identity = {  # what must match for a state to be usable, part by part
            "config": json.dumps(asdict(model.config), sort_keys=True),
            "weights": files.tensors_digest(dict(model.named_parameters())),
            "codebooks": files.tensors_digest(codebooks),
        }
        # The dtypes and shapes of a context of this model, without the rows.
        tensors = model.init_state(1, torch.device("meta")).to_tensors()
        dtype = accumulation_dtype(next(model.parameters()).dtype)
        tensors["logits"] = torch.empty(1, model.config.vocab_size, dtype=dtype, device="meta")
        for name in [name for name in tensors if name.endswith("/position")]:
            tensors[name.replace("/position", "/document")] = tensors[name]
        self._header = {name: (DTYPES[x.dtype], tuple(x.shape[1:])) for name, x in tensors.items()}

    @functools.cached_property
    def _codebooks(self) -> list[Tensor]:
        return [x.quantizer.codebook.cpu() for x in self._model.codebook_layers()]

    def save(self, path: Path, context: Context, metadata: Mapping[str, str] | None = None) -> None:
        """Write logits, state, metadata and the identity of the model to one file, atomically."""
        tensors = {"logits": context.logits} | context.state.to_tensors()
        files.write_tensors(path, tensors, dict(metadata or {}) | self.identity)

    def load(self, path: Path, n_rows: int | None = None) -> Context:
        """Load a context; raise SnapshotError for other files, and for those of other models.

        n_rows: the number of rows it must have; None accepts any. Nothing is read or allocated for
        a file with other tensors than a context of this model has.
        """

        def check(header: files.Header, metadata: dict[str, str]) -> None:
            if "logits" not in header or "config" not in metadata:
                raise SnapshotError(f"{path} is not a snapshot; write one with --save-state")
            if wrong := [x for x, value in self.identity.items() if metadata.get(x) != value]:
                problem = f"{path} was written by another model ({wrong[0]} differ)"
                raise SnapshotError(f"{problem}; write it again with --save-state")
            self._check_header(path, header, n_rows)

        try:
            tensors, _ = files.read_tensors(path, check=check)
        except files.CorruptFileError as error:
            raise SnapshotError(f"{error}; write the snapshot again with --save-state") from error
        _check_values(path, tensors, self._model.config.n_code)
        state = ModelState.from_tensors(tensors)
        if self._codebooks and not are_codewords(state.vq_layers, self._codebooks):
            raise SnapshotError(f"{path} has keys that are not codewords of this model")
        device = next(self._model.parameters()).device
        return Context(tensors["logits"].to(device), state.to(device))

    def _check_header(self, path: Path, header: files.Header, n_rows: int | None) -> None:
        """Raise SnapshotError unless these are the tensors of a context of this model."""
        wanted = self._header
        optional = {name for name in wanted if name.endswith("/document")}
        if wrong := (wanted.keys() ^ header.keys()) - optional:
            name = f"{min(wrong)!r:.80}"
            raise SnapshotError(f"{path} is not a snapshot: {name} is missing or unknown")
        rows = header["logits"][1][:1] if n_rows is None else (n_rows,)
        window_dtype, window_shape = header["state/layers/0/k"]
        for name, (dtype, shape) in header.items():
            want_dtype, want = wanted[name]
            if name.endswith(("/k", "/v")):
                if window_dtype == "BF16":  # of a model that computes in bf16
                    want_dtype = "BF16"
                if self._model.config.attention == "full":  # grows by one key and value per token
                    want = want[:1] + window_shape[2:3] + want[2:]
            if dtype != want_dtype or shape != rows + want or rows == (0,):
                what = f"{name} is {dtype} {list(shape)}"
                raise SnapshotError(f"{path} is not a snapshot of this model: {what}")


def save_context(path: str | os.PathLike[str], model: TransformerVQ, context: Context) -> None:
    """Write logits, state and the identity of the model to one safetensors file, atomically."""
    Snapshots(model).save(Path(path), context)


def load_context(path: str | os.PathLike[str], model: TransformerVQ) -> Context:
    """Load the context that `save_context` wrote; reject files from another model."""
    return Snapshots(model).load(Path(path))


def _check_values(path: Path, tensors: dict[str, Tensor], n_code: int) -> None:
    """Raise SnapshotError if a value would overflow, or is not a possible code or count."""
    limits = {"z": n_code, "count": MAX_TOKENS, "position": MAX_TOKENS}
    for name, x in tensors.items():
        limit = limits.get(name.rpartition("/")[2], math.inf)
        is_possible = x.abs() <= MAX_VALUE if x.is_floating_point() else (x >= 0) & (x < limit)
        if not is_possible.all():
            raise SnapshotError(f"{path} has invalid values in {name}")
