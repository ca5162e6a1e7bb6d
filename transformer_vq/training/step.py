"""One update: all its micro-batches, then weights and codebooks once each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_vq.checkpoint import state_from_tensors, state_to_tensors
from transformer_vq.config import RunConfig
from transformer_vq.data.batches import Batch
from transformer_vq.nn.device import matmul_precision
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, NotFiniteError
from transformer_vq.training.loss import token_loss
from transformer_vq.training.optim import learning_rate, make_optimizer


@dataclass(frozen=True)
class Update:
    """What one update saw. Losses are means over all targets of the batch."""

    nats_per_token: float
    commit_loss: float
    grad_norm: float
    lr: float
    tokens: int
    code_usage: tuple[CodeUsage, ...]


class Trainer:
    """A model, its optimizer and the states carried through truncated BPTT."""

    def __init__(self, model: TransformerVQ, config: RunConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = model.to(device).train()
        self.model.set_recompute(config.train.recompute)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.carried: list[ModelState] = []
        """One state per micro-batch; empty where the next update begins new sequences."""
        self._forward = torch.compile(self.model) if config.train.compile else self.model

    def update(self, batch: Batch, step: int, begins: bool) -> Update:
        """One step of the optimizer on the windows of `batch`.

        step: how many updates came before. begins: the windows are the first of their sequences.
        Raises NotFiniteError, before anything is changed, if the loss or the gradient is not.
        """
        n_parts = self.config.train.accumulate
        n_rows = batch.tokens.shape[0] // n_parts
        if begins:
            self.carried = [self.model.init_state(n_rows) for _ in range(n_parts)]
        n_targets = max(batch.n_targets, 1)
        losses: list[Tensor] = []
        usages: tuple[CodeUsage, ...] | None = None
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(n_parts):
            part = batch.map(lambda x, i=i: x[i * n_rows : (i + 1) * n_rows].to(self.device))  # type: ignore[misc]
            with matmul_precision(self.device, self.config.train.precision):
                output = self._forward(part.tokens, self.carried[i], part.valid, part.document_ids)
                part_nats = token_loss(output, part) / n_targets
                part_commit = output.commit_loss * (part.n_targets / n_targets)
            (part_nats + self.config.model.commit_coef * part_commit).backward()
            self.carried[i] = output.state.detach()
            losses.append(torch.stack([part_nats.detach(), part_commit.detach()]))
            usages = _add(usages, output.code_usage)
        nats, commit = torch.stack(losses).sum(0)
        grad_norm = self._clip()
        if not torch.isfinite(nats + commit + grad_norm):
            raise NotFiniteError(f"loss {float(nats)}, gradient norm {float(grad_norm)}")
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.model.update_codebooks(usages or ())
        return Update(float(nats), float(commit), float(grad_norm), lr, n_targets, usages or ())

    def _clip(self) -> Tensor:
        """Scale the gradients down to the norm allowed; their norm before that."""
        limit = self.config.optim.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), float("inf") if limit is None else limit
        )
        return norm.detach()

    def tensors(self) -> dict[str, Tensor]:
        """All that is needed beside the model to go on bit for bit: optimizer, states, RNG."""
        found = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        for i, state in enumerate(self.carried):
            found |= state_to_tensors(state, f"state{i}")
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for name, p in self.model.named_parameters():
            prefix = f"optimizer/{name}/"
            moments: dict[str, Any] = {
                key.removeprefix(prefix): x.to(self.device if x.ndim else "cpu")
                for key, x in tensors.items()
                if key.startswith(prefix)
            }
            if "step" in moments and not moments["step"].is_floating_point():
                moments["step"] = int(moments["step"])  # Adafactor counts in whole numbers
            if moments:
                self.optimizer.state[p] = moments
        n_states = len({key.split("/")[0] for key in tensors if key.startswith("state")})
        self.carried = [
            state_from_tensors(tensors, f"state{i}").to(self.device) for i in range(n_states)
        ]
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)


def _add(
    total: tuple[CodeUsage, ...] | None, usages: tuple[CodeUsage, ...]
) -> tuple[CodeUsage, ...]:
    if total is None:
        return usages
    return tuple(a + b for a, b in zip(total, usages, strict=True))
