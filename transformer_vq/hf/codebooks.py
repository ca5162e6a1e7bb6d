"""Codebooks that follow training: updated once per optimizer step, whatever the training loop.

Each training pass of a model adds its codebook statistics to `code_usage`. A hook that PyTorch
calls after every optimizer step applies them to the models whose parameters were updated. So
`Trainer`, TRL, accelerate and hand-written loops need no callback.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer, add_usages, token_priority
from transformer_vq.parallel.data_parallel import default_group, total_usage


class CodebookUpdates(nn.Module):
    """Collects the code usage of training passes and applies it after each optimizer step."""

    branches: nn.ModuleList
    code_usage: tuple[CodeUsage, ...] | None = None
    """Sum over the training passes since the last optimizer step, or None."""
    codebooks_frozen: bool = False
    """Whether training leaves all codebooks unchanged."""
    _n_micro_batches: int = 0
    _warned: bool = False

    def codebook_layers(self) -> list[VQAttention]:
        return [branch for branch in self.branches if isinstance(branch, VQAttention)]

    def add_usage(self, usages: tuple[CodeUsage, ...]) -> None:
        """Add the code usage of one training pass, to be applied after the optimizer step."""
        if not any(self._follows(layer) for layer in self.codebook_layers()):
            self._warn_if_adapted()
            return
        self._n_micro_batches += 1
        self.code_usage = add_usages(self.code_usage, usages)
        _PENDING.add(self)
        _install_hook()

    def update_codebooks(self, code_usage: Sequence[CodeUsage] | None = None) -> None:
        """Move the codebooks towards the keys of `code_usage`; happens after each optimizer step.

        code_usage: by default that of all training passes since the last update, on all processes.
        Codebooks of frozen layers do not move.
        """
        if code_usage is None and self.code_usage is not None:
            code_usage = total_usage(self.code_usage, default_group())
        if code_usage is not None:
            for layer, usage in zip(self.codebook_layers(), code_usage, strict=True):
                if self._follows(layer):
                    layer.update_codebook(usage)
        self.drop_code_usage()

    def drop_code_usage(self) -> None:
        """Discard the code usage since the last update, as for a skipped optimizer step."""
        self.code_usage, self._n_micro_batches = None, 0
        _PENDING.discard(self)

    def key_priority(self, n_rows: int, seq_len: int, valid: Tensor | None) -> Tensor:
        """Return the priority of keys as candidates for new codes: [n_rows, seq_len].

        The result is the same for any number of micro-batches and ranks. Rows are numbered in the
        order in which a `Trainer` distributes them: by micro-batch, then by rank.
        """
        group = default_group()
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        first_row = (self._n_micro_batches * size + rank) * n_rows
        device = next(self.parameters()).device if valid is None else valid.device
        return token_priority(n_rows, seq_len, valid, device, first_row)

    def _follows(self, layer: VQAttention) -> bool:
        """Return whether training moves the codebook of a layer.

        Not if the layer is frozen, as under an adapter (PEFT): files of adapters do not contain
        codebooks, unless the adapter wraps the quantizer (`modules_to_save=["quantizer"]`).
        """
        if self.codebooks_frozen:
            return False
        return layer.u.requires_grad or not isinstance(layer.quantizer, VectorQuantizer)

    def _warn_if_adapted(self) -> None:
        if self._warned or self.codebooks_frozen:
            return
        self._warned = True
        if any(p.requires_grad for layer in self.codebook_layers() for p in layer.parameters()):
            warnings.warn(
                "the codebooks stay frozen, because the layers under the adapter are; use "
                "modules_to_save=['quantizer'] to train the codebooks and save them with it",
                stacklevel=2,
            )


_PENDING: weakref.WeakSet[CodebookUpdates] = weakref.WeakSet()
"""Models with code usage that has not been applied."""
_installed: list[Any] = []


def _install_hook() -> None:
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update the codebooks of the models whose parameters the optimizer has updated."""
    if not _PENDING:
        return
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_PENDING):
        if any(id(p) in updated for p in model.parameters()):
            with torch.no_grad():
                model.update_codebooks()
