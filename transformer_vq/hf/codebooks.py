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
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback

from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import Stack
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer, add_usages, token_priority
from transformer_vq.parallel.data_parallel import default_group, total_usage


class CodebookUpdates(Stack):
    """Collects the code usage of training passes and applies it after each optimizer step."""

    codebooks_frozen: bool = False  # whether training leaves all codebooks unchanged
    code_usage: tuple[CodeUsage, ...] | None = None
    """Sum over the training passes since the last optimizer step, or None."""
    _n_passes: int = 0
    _warned_frozen: bool = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_usage(self, usages: tuple[CodeUsage, ...]) -> None:
        """Add the code usage of one training pass, to be applied after the optimizer step."""
        frozen = [layer for layer in self.codebook_layers() if not self._follows(layer)]
        for layer in frozen:
            layer.quantizer._n_unused = 0  # it is frozen, so do not warn about missing updates
        if len(frozen) == len(self.codebook_layers()):
            self._warn_if_adapted()
            return
        self.code_usage = add_usages(self.code_usage, usages)
        self._n_passes += 1
        _PENDING[self] = None

    @torch.no_grad()
    def update_codebooks(self, code_usage: Sequence[CodeUsage] | None = None) -> None:
        """Move the codebooks toward the keys of `code_usage`; happens after each optimizer step.

        code_usage: by default that of all training passes since the last update, on all processes.
        Codebooks of frozen layers do not move.
        """
        if code_usage is None and self.code_usage is not None:
            code_usage = total_usage(self.code_usage, default_group())
        pairs = () if code_usage is None else zip(self.codebook_layers(), code_usage, strict=True)
        for layer, usage in pairs:
            if self._follows(layer):
                layer.update_codebook(usage)
        self.drop_code_usage()

    def drop_code_usage(self) -> None:
        """Discard the code usage since the last update, as for a skipped optimizer step."""
        self.code_usage, self._n_passes = None, 0
        _PENDING.pop(self, None)

    def key_priority(self, n_rows: int, seq_len: int, valid: Tensor | None) -> Tensor:
        """Return the priority of keys as candidates for new codes: [n_rows, seq_len].

        The result is the same for any number of micro-batches and ranks. Rows are numbered in the
        order in which a `Trainer` distributes them: by micro-batch, then by rank.
        """
        group = default_group()
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        first_row = (self._n_passes * size + rank) * n_rows
        device = next(self.parameters()).device if valid is None else valid.device
        return token_priority(n_rows, seq_len, valid, device, first_row)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no pending code usage, as copies of parameters have no grad."""
        return {n: x for n, x in vars(self).items() if n not in ("code_usage", "_n_passes")}

    def _follows(self, layer: VQAttention) -> bool:
        """Return whether training moves the codebook of a layer.

        Not if the layer is frozen, as under an adapter (PEFT): files of adapters do not contain
        codebooks, unless the adapter wraps the quantizer (`modules_to_save=["quantizer"]`).
        """
        is_trained = layer.u.requires_grad or not isinstance(layer.quantizer, VectorQuantizer)
        return is_trained and not self.codebooks_frozen

    def _warn_if_adapted(self) -> None:
        """Warn once if layers are trained, but by an adapter that cannot save their codebooks."""
        if self._warned_frozen or self.codebooks_frozen:
            return
        if any(p.requires_grad for layer in self.codebook_layers() for p in layer.parameters()):
            self._warned_frozen = True
            problem = "the codebooks are not trained: the base weights of their layers are frozen"
            fix = "to train and save them with a PEFT adapter, use modules_to_save=['quantizer']"
            hint = "freeze_codebooks() hides this warning"
            warnings.warn(f"{problem}; {fix}; {hint}", stacklevel=2)


_PENDING: weakref.WeakKeyDictionary[CodebookUpdates, None] = weakref.WeakKeyDictionary()
"""Models with code usage that has not been applied, in the same order on all ranks."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update the codebooks of the models whose parameters the optimizer has updated."""
    if not _PENDING:
        return
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_PENDING):
        if any(id(p) in updated for p in model.parameters()):
            model.update_codebooks()


register_optimizer_step_post_hook(_after_step)


class CodebookCallback(TrainerCallback):
    """Handles optimizer steps that are skipped, and optimizers that are not from torch.optim.

    Other steps update the codebooks without a callback. If a step is skipped, as with fp16 gradient
    scaling, its code usage is discarded; without this callback, it is applied with the next step.
    It updates the codebooks for optimizers without PyTorch's hooks, as in DeepSpeed.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for module in kwargs["model"].modules():
            if not isinstance(module, CodebookUpdates):
                continue
            if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
                module.drop_code_usage()
            else:
                module.update_codebooks()  # does nothing if the hook has done it
