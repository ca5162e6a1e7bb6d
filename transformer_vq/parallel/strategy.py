"""How the ranks of a mesh share a training step, and how their results are combined.

A single process runs the same code; every split is a no-op. Losses, gradients and code usage do not
depend on the mesh, up to rounding and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.config import ParallelConfig, RunConfig
from transformer_vq.data.batches import Batch
from transformer_vq.device import compiles_training, to_device
from transformer_vq.errors import UserError
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage
from transformer_vq.parallel.context_parallel import (
    after_tokens,
    exchange_states,
    own_columns,
    own_shard,
    share_last,
)
from transformer_vq.parallel.data_parallel import shard_parameters, total_usage
from transformer_vq.parallel.shards import Shard
from transformer_vq.parallel.tensor_parallel import (
    STATE,
    check_widths,
    shard_widths,
    sharded,
    sharded_axes,
)
from transformer_vq.parallel.world import AXES, World
from transformer_vq.progress import info

COMPILER = "inductor"


def check_mesh(config: RunConfig, mesh: ParallelConfig) -> None:
    """Raise UserError if a run cannot be trained on a mesh."""
    model, train = config.model, config.train
    n_parts = max(train.accumulate, 1)
    if train.batch_size % (n := mesh.n_rows * n_parts):
        problem = f"train.batch_size={train.batch_size} cannot be split across dp x fsdp ="
        ranks = f"{mesh.n_rows} ranks with train.accumulate={n_parts}"
        raise UserError(f"{problem} {ranks}; use a multiple of {n}")
    if mesh.cp > 1 and model.attention == "full":
        problem = f"parallel.cp={mesh.cp} requires model.attention=vq, because full attention"
        raise UserError(f"{problem} keeps all keys; use model.attention=vq or parallel.cp=1")
    if mesh.cp > 1 and model.position == "rope":
        raise UserError(f"parallel.cp={mesh.cp} requires model.position=xl; use parallel.cp=1")
    if mesh.cp > 1 and train.backprop_len % (n := mesh.cp * model.block_len):
        problem = f"train.backprop_len={train.backprop_len} cannot be split into parallel.cp="
        fix = f"use a multiple of {n} (cp x model.block_len)"
        raise UserError(f"{problem}{mesh.cp} shards of complete blocks; {fix}")
    if mesh.tp > 1:
        check_widths(model, mesh.tp)


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of a micro-batch, with the states before it."""

    span: Batch
    """All tokens of the rows of this rank."""
    shard: Batch
    """The tokens that this rank processes; the span itself without context parallelism."""
    before_span: ModelState
    before_shard: ModelState
    n_targets: int
    """Number of targets of the shard, without padding."""


class ParallelStrategy:
    """This rank's part in the training steps of a run; changes the model in place."""

    def __init__(
        self, model: TransformerVQ, config: RunConfig, world: World, device: torch.device
    ) -> None:
        mesh = world.mesh
        check_mesh(config, mesh)
        self.model = model
        self.config = config
        self.world = world
        self._device = device
        self.is_compiled = compiles_training(config.train.compile, self._device)
        """Whether training passes are compiled."""
        self._tp_axes = sharded_axes(model) if mesh.tp > 1 else {}
        if mesh.tp > 1:
            shard_widths(model, world.axes["tp"])
        if mesh.cp > 1:
            exchange_states(model, world.group("cp"))
        self._streams: RNGStreams | None = None
        if self.is_compiled:
            compile_branches(model)
        if not world.is_single_process:
            self._streams = RNGStreams(model, world, config.train.seed)
            shard_parameters(model, config, world)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=device)
            model.tie_weights()
        self.parameters = dict(model.named_parameters())
        """The parameters for the optimizer: DTensors, unless there is a single process."""

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this rank processes, in the order of the micro-batches."""
        n_parts, n_ranks = self.config.train.accumulate, self.world.size("rows")
        n_rows = self.config.train.batch_size // (n_parts * n_ranks)
        firsts = [(i * n_ranks + self.world.rank("rows")) * n_rows for i in range(n_parts)]
        return [first + i for first in firsts for i in range(n_rows)]

    # One training step: micro_batch -> forward -> backward -> carry, then the sums.

    def micro_batch(self, batch: Batch, step: int, index: int, state: ModelState) -> MicroBatch:
        """Return this rank's part of one of `train.accumulate` micro-batches.

        batch: the `rows` of this rank. state: that before the span. The backward pass of the last
        one averages the gradients.
        """
        n_parts = self.config.train.accumulate
        n_rows = len(self.rows) // n_parts
        rows = batch.map(lambda x: x[index * n_rows : (index + 1) * n_rows])
        rank, size = self.world.rank("cp"), self.world.size("cp")
        # Counted on the host: reading a number from a GPU would wait for it.
        n_targets = own_columns(rows, rank, size).n_targets
        span = rows.map(lambda x: to_device(x, self._device))
        shard, before_shard = own_shard(span, state, rank, size)
        if self._streams is not None:
            self._streams.start(step, index)
        if not self.world.is_single_process:
            # Gradients of earlier micro-batches stay on their rank until the last one.
            self.model.set_requires_gradient_sync(index == n_parts - 1)  # type: ignore[operator]
        return MicroBatch(span, shard, state, before_shard, n_targets)

    def forward(self, part: MicroBatch) -> ModelOutput:
        """Return the output of the model for this rank's tokens."""
        shard = part.shard
        output: ModelOutput = self.model(
            shard.tokens, part.before_shard, shard.valid, shard.document_ids, shard.key_priority
        )
        return output

    def token_loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of all valid targets, in nats (float32)."""
        logits, targets = output.logits.flatten(0, 1), batch.targets.flatten()
        with self._sharded_loss():
            losses = self.full(F.cross_entropy(logits, targets, reduction="none"))
        losses = losses.view_as(batch.targets)
        return losses.sum() if batch.valid is None else (losses * batch.valid).sum()

    def _sharded_loss(self) -> AbstractContextManager[None]:
        """Return the context in which logits that are sharded by token are never gathered."""
        if self.world.size("tp") == 1:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: AbstractContextManager[None] = loss_parallel()
        return context

    def backward(self, loss: Tensor) -> None:
        """Compute gradients. loss: this rank's term of a sum over all ranks.

        FSDP averages gradients, so the loss is scaled by the number of ranks.
        """
        with self._sharded_loss():
            (self.world.size("data") * loss).backward()

    def carry(self, part: MicroBatch, after: ModelState) -> ModelState:
        """Return the state after the span. after: the state after this rank's shard."""
        if self.world.size("cp") == 1:
            return after
        end = after_tokens(part.before_span, part.span).layers[0]
        after = share_last(after, self.world.group("cp"))
        layers = (
            replace(layer, position=end.position, document=end.document) for layer in after.layers
        )
        return replace(after, layers=tuple(layers))

    def sum_losses(self, nats: Tensor, commit: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses summed over all ranks."""
        both = self.world.sum(torch.stack([nats, commit]), "data")
        return both[0], self.world.sum(both[1], "tp")

    def sum_usages(self, usages: tuple[CodeUsage, ...]) -> tuple[CodeUsage, ...]:
        """Return the code usage summed over all ranks with different tokens."""
        group = None if self.world.size("data") == 1 else self.world.group("data")
        return total_usage(usages, group)

    # Checkpoints: tensors with what is needed to write and read them on any mesh.

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model by name: DTensors where they are sharded."""
        found: dict[str, Tensor] = self.model.state_dict()
        codebooks = [name for name in self._tp_axes if name in dict(self.model.named_buffers())]
        return found | {x: self._sharded(found[x], {"tp": self._tp_axes[x]}) for x in codebooks}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the tensors of the model from full ones, of which each rank takes its part."""
        targets = self.model_tensors()
        for name, x in weights:
            shard = Shard(targets[name])
            shard.local.detach().copy_(x[shard.slices])

    def release_gathered(self) -> None:
        """Free the parameters that FSDP has gathered, so that the next pass reads the shards.

        Needed where parameters change without a backward pass since the last forward pass.
        """
        if self.world.is_single_process:
            return
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full(self, x: Tensor) -> Tensor:
        """Return a full tensor of the optimizer; all ranks must call this together."""
        full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x  # a DTensor
        return full

    def shard_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mark the tensors of this rank's rows of a state as shards. tensors: named by field."""
        if self.world.is_single_process:
            return tensors
        return {name: self._sharded(x, self._state_axes(name)) for name, x in tensors.items()}

    def own_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of the full tensors of a state."""
        found = dict(tensors)
        for name in found:
            for axis, dim in self._state_axes(name).items():
                found[name] = found[name].chunk(self.world.size(axis), dim)[self.world.rank(axis)]
        return found

    def _sharded(self, x: Tensor, axes: Mapping[str, int]) -> Tensor:
        """Return a DTensor with x as the shard of this rank. axes: of the mesh, with those of x."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Shard(axes[a] % x.ndim) if a in axes else Replicate() for a in AXES]
        return DTensor.from_local(x, self.world.device_mesh, placements, run_check=False)

    def _state_axes(self, name: str) -> dict[str, int]:
        """Return the mesh axes that shard a tensor of the state, each with the tensor's dimension.

        Names end with a field of a state dataclass: `state0/layers/3/cache/mean`. Every field has
        rows first, except for the dropout mask of the sinusoids, which all ranks share.
        """
        field = name.rsplit("/", 1)[-1]
        if field == "sinusoid_mask":
            return {}
        tp_dim = STATE[sharded(self.model.config.layer.heads)].get(field)
        rows = {"dp_replicate": 0, "dp_shard": 0}
        return rows if tp_dim is None else {"tp": tp_dim} | rows


class RNGStreams:
    """RNG streams of a rank, determined by the seed, the step and the mesh.

    There are three, because ranks must agree on some dropout masks but not on others:

    - `sinusoids`: dropout on the sinusoids, the same on all ranks; a checkpoint stores one mask.
    - `rows`: LayerDrop, drawn per sequence; the same on ranks that share a sequence.
    - `tokens`: residual dropout, drawn per token; different on every rank but those along tp.

    Hooks on the branches switch between them during the forward pass. The model draws LayerDrop
    masks before the first branch, sinusoid masks in a branch and residual dropout after it.
    """

    def __init__(self, model: TransformerVQ, world: World, seed: int) -> None:
        self.device = world.device
        self.seed = seed
        self.stream_keys = {
            "sinusoids": (0, 0, 0),
            "rows": (1, world.rank("rows"), 0),
            "tokens": (2, world.rank("rows"), world.rank("cp")),
        }
        self.states: dict[str, Tensor] = {}
        self.current = "rows"
        for branch in model.branches:
            branch.register_forward_pre_hook(lambda *_: self._switch("sinusoids"))
            branch.register_forward_hook(lambda *_: self._switch("tokens"))

    def start(self, step: int, micro_batch: int) -> None:
        """Seed all streams for the forward pass of one micro-batch of a step."""
        for name, key in self.stream_keys.items():
            sequence = np.random.SeedSequence([self.seed, step, micro_batch, *key])
            generator = torch.Generator(self.device)
            generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
            self.states[name] = generator.get_state()
        self.current = "rows"
        self._set(self.states["rows"])

    def _switch(self, name: str) -> None:
        if self.states:
            is_cuda = self.device.type == "cuda"
            state = torch.cuda.get_rng_state(self.device) if is_cuda else torch.get_rng_state()
            self.states[self.current] = state
            self.current = name
            self._set(self.states[name])

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def compile_branches(model: TransformerVQ) -> None:
    """Compile the forward and backward pass of every branch in place, for training only.

    Each branch is compiled by itself. All branches of one shape share a graph, so the start takes
    as long for 48 branches as for one. FSDP works between branches, in eager mode: it reduces
    gradients while earlier branches are still in their backward pass.

    Names of parameters and hooks of the branches stay as they are: hooks run in eager mode, before
    and after a compiled branch. Evaluation mode stays eager, because its lengths vary.
    """
    for branch in model.branches:
        compiled = torch.compile(branch.forward, fullgraph=True, backend=COMPILER)
        branch.forward = _in_training(branch, compiled, branch.forward)
    note = "the first steps compile the layers, which may take minutes"
    info(f"torch.compile is on: {note}; --train.no-compile turns it off")


def _in_training(
    branch: nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward function that is compiled in training mode and eager otherwise."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if branch.training else eager)(*args, **kwargs)

    return forward
