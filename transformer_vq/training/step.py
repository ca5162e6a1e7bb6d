"""One training step: all micro-batches, then one update of the weights and of the codebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import Batch
from transformer_vq.device import has_fast_bf16, matmul_precision
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, NotFiniteError, add_usages
from transformer_vq.ops import triton
from transformer_vq.parallel.shards import Index, empty, is_sharded
from transformer_vq.parallel.strategy import ParallelStrategy
from transformer_vq.parallel.world import World
from transformer_vq.progress import warn
from transformer_vq.training.optim import learning_rate, make_optimizer


class NotFiniteStepError(NotFiniteError):
    """A training step with NaN or inf. step: its number, from 1."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


@dataclass
class StepLosses:
    """Nats per token, commitment loss and gradient norm of a step, [3] on the device.

    They are checked later: reading them after every step would make the host wait.
    """

    step: int
    """Number of the step, from 1."""
    tensor: Tensor

    @cached_property
    def values(self) -> list[float]:
        """The losses as numbers; the first use waits for a GPU."""
        values: list[float] = self.tensor.tolist()
        return values


@dataclass(frozen=True)
class StepResult:
    """Metrics of one training step. Losses are means over all targets of the batch.

    The first use of a loss or of the gradient norm waits for the GPU.
    """

    losses: StepLosses
    lr: float
    tokens: int
    code_usage: tuple[CodeUsage, ...]

    @property
    def nats_per_token(self) -> float:
        return self.losses.values[0]

    @property
    def commit_loss(self) -> float:
        return self.losses.values[1]

    @property
    def grad_norm(self) -> float:
        return self.losses.values[2]


class Trainer:
    """A model, its optimizer and the states carried through truncated BPTT.

    model: on the meta device, it gets memory for this rank's shards only, and its tensors must be
    loaded. world: the processes that share each step; by default a single process.
    """

    def __init__(
        self,
        model: TransformerVQ,
        config: RunConfig,
        device: torch.device,
        world: World | None = None,
    ) -> None:
        if config.train.backend == "triton":
            triton.check_device(device)
        self.config = config
        self.device = device
        self.world = World() if world is None else world
        is_empty = any(p.is_meta for p in model.parameters())
        self.model = (model if is_empty else model.to(device)).train()
        self.model.set_execution(
            reduction=config.train.reduction,
            backend=config.train.backend,
            checkpoint_activations=config.train.checkpoint_activations,
        )
        self.strategy = ParallelStrategy(self.model, config, self.world, device)
        self.optimizer = make_optimizer(self.strategy.parameters, config.optim)
        self.average: dict[str, Tensor] = {}
        """Moving average of each parameter, sharded like it; empty if there is no average.

        Codebooks are moving averages already, so an averaged model uses the current ones."""
        self.restart_average()
        self.checks_each_step = device.type == "cpu"
        """Whether `step` checks the losses; on a GPU this would wait, so `check_finite` does."""
        self._unchecked: list[StepLosses] = []
        self.carried: list[ModelState] = []
        """One state per micro-batch; empty if the next step starts new sequences."""
        if config.train.precision == "bf16" and not has_fast_bf16(device):
            warn(f"{device} emulates bf16; --train.precision fp32 is several times faster")

    def step(
        self,
        batch: Batch,
        step: int,
        begins: bool,
        ends: bool = False,
        n_targets: int | None = None,
    ) -> StepResult:
        """Take one optimizer step on one span of the sequences of `batch`.

        batch: that of all ranks; or the `strategy.rows` of this rank, if n_targets of all ranks is
        given. step: number of steps already taken. begins, ends: whether the spans are the first
        and the last of their sequences.
        On a CPU, raises NotFiniteError, before any weight changes, if the loss or a gradient is not
        finite. On a GPU, call `check_finite` from time to time, and before anything is saved.
        """
        n_parts, rows = self.config.train.accumulate, self.strategy.rows
        if n_targets is None:
            n_targets = batch.n_targets
            batch = batch.map(lambda x: x[rows])
        n_targets = max(n_targets, 1)
        if begins:
            n_rows = len(rows) // n_parts
            self.carried = [self.model.init_state(n_rows) for _ in range(n_parts)]
        if self.model.uses_candidates:
            batch = replace(batch, key_priority=self._key_priority(batch, step))
        losses: list[Tensor] = []
        usages: tuple[CodeUsage, ...] | None = None
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(n_parts):
            part = self.strategy.micro_batch(batch, step, i, self.carried[i])
            with matmul_precision(self.device, self.config.train.precision):
                output = self.strategy.forward(part)
                nats = self.strategy.token_loss(output, part.shard) / n_targets
                commit = output.commit_loss * (part.n_targets / n_targets)
            self.strategy.backward(nats + self.config.model.commit_coef * commit)
            self.carried[i] = self.strategy.carry(part, output.state.detach())
            losses.append(torch.stack([nats.detach(), commit.detach()]))
            usages = add_usages(usages, output.code_usage)
        nats, commit = self.strategy.sum_losses(*torch.stack(losses).sum(0))
        grad_norm = self._clip_gradients()
        step_losses = StepLosses(step + 1, torch.stack([nats, commit, grad_norm]))
        self._unchecked.append(step_losses)
        if self.checks_each_step:
            self.check_finite()
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._update_average(step)
        usages = self.strategy.sum_usages(usages or ())
        self.model.update_codebooks(usages)
        if ends:
            self.carried = []
        return StepResult(step_losses, lr, n_targets, usages)

    def _key_priority(self, batch: Batch, step: int) -> Tensor:
        """Draw priorities for the full batch, so the same keys are chosen on every mesh."""
        generator = np.random.default_rng([self.config.train.seed, step, 1])
        shape = (self.config.train.batch_size, batch.tokens.shape[1])
        return torch.from_numpy(generator.integers(2**62, size=shape))[self.strategy.rows]

    def _clip_gradients(self) -> Tensor:
        """Clip the global gradient norm; return the norm before clipping."""
        limit = self.config.optim.grad_clip
        limit = math.inf if limit is None else limit
        norm = torch.nn.utils.clip_grad_norm_(self.strategy.parameters.values(), limit)
        return self.strategy.full(norm.detach())

    def check_finite(self) -> None:
        """Raise NotFiniteStepError for the first step since the last call that was not finite.

        Waits for the GPU.
        """
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        rows = torch.stack([x.tensor for x in unchecked]).tolist()  # a single copy
        for losses, values in zip(unchecked, rows, strict=True):
            losses.values = values
            if not math.isfinite(sum(values)):
                reason = f"loss {values[0]}, gradient norm {values[2]}"
                raise NotFiniteStepError(losses.step, reason)

    def check_weights(self, step: int) -> None:
        """Raise NotFiniteStepError if a weight or a codebook is not finite; waits for the GPU.

        step: number of steps already taken. All ranks must call this together.
        """
        tensors = [*self.strategy.parameters.values(), *self.model.buffers()]
        local = [x.to_local() if is_sharded(x) else x for x in tensors]
        finite = [x.isfinite().all() for x in local if x.is_floating_point()]
        if self.world.any(not torch.stack(finite).all()):
            raise NotFiniteStepError(step, "its update gave weights that are NaN or inf")

    def restart_average(self) -> None:
        """Let the average of the weights, if there is one, start with the current weights."""
        if self.config.train.weight_average:
            parameters = self.strategy.parameters.items()
            self.average = {name: p.detach().clone() for name, p in parameters}

    def _update_average(self, step: int) -> None:
        """Include the new weights; in early steps with a larger share, to forget initial ones."""
        if self.average:
            # Not `AveragedModel`, whose count of updates makes the host wait for a GPU.
            decay = min(self.config.train.weight_average, (1 + step) / (10 + step))
            weights = [p.detach() for p in self.strategy.parameters.values()]
            get_ema_multi_avg_fn(decay)(list(self.average.values()), weights, step)

    @contextmanager
    def averaged_model(self) -> Iterator[TransformerVQ]:
        """Yield the model to validate and keep: with averaged weights if there is an average.

        The weights are exchanged in place, so `self.model` has the average during the body.
        """
        self._exchange_average()
        try:
            yield self.model
        finally:
            self._exchange_average()

    @torch.no_grad()
    def _exchange_average(self) -> None:
        for name, average in self.average.items():
            p = self.strategy.parameters[name]
            current = p.detach().clone()
            p.copy_(average)
            average.copy_(current)
        self.strategy.release_gathered()

    def tensors(self) -> dict[str, Tensor]:
        """Return all that an exact resume needs; DTensors where this rank has a shard.

        That is the model, the optimizer, the average of the weights, the carried states and the RNG
        state. Names do not depend on the mesh.
        """
        found = {f"model/{name}": x for name, x in self.strategy.model_tensors().items()}
        found["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            found["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        for name, p in self.strategy.parameters.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        found |= {f"average/{name}": x for name, x in self.average.items()}
        for i, state in enumerate(self.carried):
            found |= self.strategy.shard_state(state.to_tensors(f"state{i}"))
        return found

    def load(self, folder: Path, index: Index) -> None:
        """Restore what `tensors` returned, on any mesh and with any number of micro-batches.

        folder, index: of a checkpoint. Each rank reads its shards.
        """
        from transformer_vq.parallel.storage import load_shards  # takes a second to import

        found = {f"model/{name}": x for name, x in self.strategy.model_tensors().items()}
        found |= {f"average/{name}": x for name, x in self.average.items()}
        self.optimizer.state.clear()
        for name, entry in index.items():
            kind, _, rest = name.partition("/")
            if kind == "rng":
                found[name] = empty(entry)
            elif kind == "optimizer":
                parameter, key = rest.split("/")
                p = self.strategy.parameters[parameter]
                if tuple(entry["shape"]) == tuple(p.shape):
                    x = torch.zeros_like(p.detach(), dtype=getattr(torch, entry["dtype"]))
                else:  # numbers stay on the CPU
                    x = empty(entry, p.device if entry["shape"] else None)
                found[name] = self.optimizer.state[p][key] = x
        states = {name: empty(x, "meta") for name, x in index.items() if name.startswith("state")}
        n_parts = self.config.train.accumulate
        is_same = len({name.partition("/")[0] for name in states}) == n_parts
        if is_same:  # otherwise rows move to other ranks: every rank reads them all
            states = self.strategy.own_state(states)
        states = {name: torch.zeros_like(x, device="cpu") for name, x in states.items()}
        found |= self.strategy.shard_state(states) if is_same else states
        load_shards(folder, index, found, self.world.checkpoint_group)
        self.strategy.release_gathered()
        for values in self.optimizer.state.values():
            if not values["step"].is_floating_point():
                values["step"] = int(values["step"])  # Adafactor counts steps in integers
        if not is_same:
            states = self.strategy.own_state(split_states(states, n_parts))
        self.carried = [
            ModelState.from_tensors(states, f"state{i}").to(self.device)
            for i in range(n_parts if states else 0)
        ]
        torch.set_rng_state(found["rng/cpu"])
        if "rng/cuda" in found and self.device.type == "cuda":
            torch.cuda.set_rng_state(found["rng/cuda"], self.device)


def split_states(tensors: dict[str, Tensor], n_parts: int) -> dict[str, Tensor]:
    """Return the carried states of a checkpoint, split among `n_parts` micro-batches.

    tensors: one state per micro-batch, `state0/...` to `state7/...`, each with the rows of all
    ranks; together they are the rows of a batch in order. Other names are ignored. The mask of the
    sinusoids belongs to a micro-batch, not to a row: a part gets that of its first row.
    """
    by_field: dict[str, list[Tensor]] = {}
    names = [name for name in tensors if name.startswith("state")]
    for name in sorted(names, key=lambda name: int(name.partition("/")[0].removeprefix("state"))):
        by_field.setdefault(name.partition("/")[2], []).append(tensors[name])
    found: dict[str, Tensor] = {}
    for field, parts in by_field.items():
        if len(parts) == n_parts:
            pieces = parts
        elif field.endswith("sinusoid_mask"):
            pieces = [parts[i * len(parts) // n_parts] for i in range(n_parts)]
        else:
            pieces = list(torch.cat(parts).chunk(n_parts))
        found |= {f"state{i}/{field}": x for i, x in enumerate(pieces)}
    return found
