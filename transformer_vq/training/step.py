"""One update: all its micro-batches, then weights and codebooks once each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import Batch
from transformer_vq.device import has_fast_bf16, matmul_precision
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, NotFiniteError, add_usages
from transformer_vq.nn.state import ModelState
from transformer_vq.parallel.data_parallel import total_usage
from transformer_vq.parallel.strategy import ParallelStrategy
from transformer_vq.parallel.world import World
from transformer_vq.progress import warn
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
    """A model, its optimizer and the states carried through truncated BPTT.

    world: the processes that work on each update together; without it this one is alone.
    """

    def __init__(
        self,
        model: TransformerVQ,
        config: RunConfig,
        device: torch.device,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.world = World() if world is None else world
        self.model = model.to(device).train()
        self.model.set_execution(
            reduction=config.train.reduction,
            checkpoint_activations=config.train.checkpoint_activations,
        )
        self.strategy = ParallelStrategy(self.model, config, self.world)
        self.optimizer = make_optimizer(
            nn.ParameterList(self.strategy.parameters.values()), config.optim
        )
        self.carried: list[ModelState] = []
        """One state per micro-batch; empty where the next update begins new sequences."""
        if config.train.precision == "bf16" and not has_fast_bf16(device):
            warn("this processor emulates bf16: fp32 is several times faster on it")

    def update(self, batch: Batch, step: int, begins: bool) -> Update:
        """One step of the optimizer on the windows of `batch`, of which this process has a share.

        step: how many updates came before. begins: the windows are the first of their sequences.
        Raises NotFiniteError, before anything is changed, if the loss or the gradient is not.
        """
        n_parts = self.config.train.accumulate
        n_rows = batch.tokens.shape[0] // n_parts
        if begins:
            n_own = n_rows // self.world.size("rows")
            self.carried = [self.model.init_state(n_own) for _ in range(n_parts)]
        if self.model.uses_candidates:
            batch = replace(batch, key_priority=self._key_priority(batch, step))
        n_targets = max(batch.n_targets, 1)
        losses: list[Tensor] = []
        usages: tuple[CodeUsage, ...] | None = None
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # where the optimizer has views of the weights
        for i in range(n_parts):
            part = batch.map(lambda x, i=i: x[i * n_rows : (i + 1) * n_rows])  # type: ignore[misc]
            part = part.map(lambda x: self.strategy.rows(x).to(self.device))
            with self.strategy.part(step, i, is_last=i == n_parts - 1):
                own, before = self.strategy.stretch(part, self.carried[i])
                with matmul_precision(self.device, self.config.train.precision):
                    output = self.strategy.forward(
                        own.tokens, before, own.valid, own.document_ids, own.key_priority
                    )
                    nats = token_loss(output, own) / n_targets
                    commit = output.commit_loss * (own.n_targets / n_targets)
                loss = nats + self.config.model.commit_coef * commit
                (self.strategy.loss_scale * loss).backward()
            self.carried[i] = self.strategy.carry(self.carried[i], part, output.state.detach())
            losses.append(torch.stack([nats.detach(), commit.detach()]))
            usages = add_usages(usages, output.code_usage)
        nats, commit = self.strategy.totals(*torch.stack(losses).sum(0))
        self.strategy.finish_gradients()
        grad_norm = self._clip()
        if not torch.isfinite(nats + commit + grad_norm):
            raise NotFiniteError(f"loss {float(nats)}, gradient norm {float(grad_norm)}")
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        usages = total_usage(usages or (), self.world.group_or_none("data"))
        self.model.update_codebooks(usages)
        return Update(float(nats), float(commit), float(grad_norm), lr, n_targets, usages)

    def _key_priority(self, batch: Batch, step: int) -> Tensor:
        """Drawn for the whole batch, so that its parts choose the same keys on every mesh."""
        generator = np.random.default_rng([self.config.train.seed, step, 1])
        return torch.from_numpy(generator.integers(2**62, size=tuple(batch.tokens.shape)))

    def _clip(self) -> Tensor:
        """Scale the gradients down to the norm allowed; their norm before that."""
        limit = self.config.optim.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(
            self.strategy.parameters.values(), float("inf") if limit is None else limit
        )
        return self.strategy.whole(norm.detach())

    def tensors(self) -> dict[str, Tensor]:
        """All that is needed beside the model to go on bit for bit: optimizer, states, RNG.

        Nothing in it depends on the layout. All processes must call this together; the first one
        gets what is to be saved.
        """
        found = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        for name, p in self.strategy.parameters.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{name}/{key}"] = self.strategy.whole(torch.as_tensor(value))
        for i, state in enumerate(self.carried):
            found |= self.strategy.whole_state(state, f"state{i}")
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for name, p in self.strategy.parameters.items():
            prefix = f"optimizer/{name}/"
            moments: dict[str, Any] = {
                key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)
            }
            for key, x in moments.items():
                if key != "step":
                    moments[key] = self.strategy.divide(x, p)
                elif not x.is_floating_point():
                    moments[key] = int(x)  # Adafactor counts in whole numbers
            if moments:
                self.optimizer.state[p] = moments
        n_states = len({key.split("/")[0] for key in tensors if key.startswith("state")})
        self.carried = [
            self.strategy.divide_state(tensors, f"state{i}").to(self.device)
            for i in range(n_states)
        ]
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)
