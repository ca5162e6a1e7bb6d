"""How the work of an update is divided among processes, and its results put together again.

A process that is alone goes the same way, with nothing to divide. Whatever the mesh, losses,
gradients and code usage are those that one process would get, up to rounding and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from transformer_vq.config import ParallelConfig, RunConfig
from transformer_vq.data.batches import Batch
from transformer_vq.errors import UserError
from transformer_vq.nn.model import ModelOutput, TransformerVQ
from transformer_vq.nn.state import ModelState
from transformer_vq.parallel.context_parallel import (
    after_tokens,
    carry_around,
    exchange_states,
    own_stretch,
)
from transformer_vq.parallel.data_parallel import replicate, shard
from transformer_vq.parallel.rng import RNGStreams
from transformer_vq.parallel.tensor_parallel import STATE, check_widths, divide_widths, undivided
from transformer_vq.parallel.world import World


def check_mesh(config: RunConfig, mesh: ParallelConfig) -> None:
    """Raises ValueError if this run cannot be divided in that way."""
    model, train = config.model, config.train
    n_parts = mesh.n_rows * max(train.accumulate, 1)
    if train.batch_size % n_parts:
        raise UserError(
            f"train.batch_size={train.batch_size} cannot be divided among dp x fsdp = "
            f"{mesh.n_rows} processes in train.accumulate={max(train.accumulate, 1)} parts; "
            f"use a multiple of {n_parts}"
        )
    if mesh.cp > 1 and model.attention == "full":
        raise UserError("parallel.cp is for model.attention=vq: full attention keeps all keys")
    if train.backprop_len % (mesh.cp * model.block_len) and mesh.cp > 1:
        raise UserError(
            f"train.backprop_len={train.backprop_len} cannot be cut into parallel.cp={mesh.cp} "
            f"stretches of whole blocks; use a multiple of {mesh.cp * model.block_len} "
            "(cp x model.block_len)"
        )
    if mesh.tp > 1:
        check_widths(model, mesh.tp)
        if mesh.fsdp > 1:
            raise UserError("parallel.tp and parallel.fsdp do not go together; use dp and tp")
    if train.compile and mesh.n_processes > 1:
        raise UserError("train.compile works in one process only; leave it out under torchrun")


class ParallelStrategy:
    """The share of this process in the updates of a run; changes the model in place."""

    def __init__(self, model: TransformerVQ, config: RunConfig, world: World) -> None:
        mesh = world.mesh
        check_mesh(config, mesh)
        self.model = model
        self.config = config
        self.world = world
        self._divided = divide_widths(model, world) if mesh.tp > 1 else {}
        if mesh.cp > 1:
            exchange_states(model, world.group("cp"))
        self._streams = (
            None if world.is_single_process else RNGStreams(model, world, config.train.seed)
        )
        self._ddp: DistributedDataParallel | None = None
        if mesh.fsdp > 1:
            shard(model, config, world)
        elif world.size("data") > 1:
            self._ddp = replicate(model, world)
        run: nn.Module = model if self._ddp is None else self._ddp
        self.forward: Callable[..., ModelOutput] = (
            torch.compile(run) if config.train.compile else run
        )
        self._in_parts = mesh.fsdp * mesh.tp > 1
        self.parameters = self._parameters()
        """What the optimizer works on; where a tensor is divided, a DTensor over its parts."""

    @property
    def loss_scale(self) -> int:
        """DDP and FSDP make means of gradients; ours are sums over a known number of targets."""
        return self.world.size("data")

    @contextmanager
    def part(self, update: int, number: int, is_last: bool) -> Iterator[None]:
        """Forward and backward pass of one part of an update."""
        if self._streams is not None:
            self._streams.begin(update, number)
        if self._ddp is None or is_last:
            yield
        else:
            with self._ddp.no_sync():
                yield

    def rows(self, x: Tensor) -> Tensor:
        return self.world.part(x, "rows", 0)

    def stretch(self, part: Batch, state: ModelState) -> tuple[Batch, ModelState]:
        """What this process works on, of its rows of a window, and the state before that."""
        return own_stretch(part, state, self.world.rank("cp"), self.world.size("cp"))

    def carry(self, before: ModelState, part: Batch, after: ModelState) -> ModelState:
        """The state after a whole window, from the states before it and after the own stretch."""
        if self.world.size("cp") == 1:
            return after
        end = after_tokens(before, part).layers[0]
        after = carry_around(after, self.world.group("cp"))
        layers = (
            replace(layer, position=end.position, document=end.document) for layer in after.layers
        )
        return replace(after, layers=tuple(layers))

    def totals(self, nats: Tensor, commit: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of all processes together."""
        both = self.world.sum(torch.stack([nats, commit]), "data")
        return both[0], self.world.sum(both[1], "tp")

    def finish_gradients(self) -> None:
        """After the last backward pass: give the optimizer the gradients of the whole batch."""
        if self._divided:
            partial = [p for p in undivided(self.model, self._divided) if p.grad is not None]
            grads = [p.grad for p in partial if p.grad is not None]
            for p, grad in zip(partial, self.world.sums(grads, "tp"), strict=True):
                p.grad = grad
        for name, p in self.model.named_parameters():
            view = self.parameters[name]
            if view is p or p.grad is None:
                continue
            from transformer_vq.parallel.parts import set_gradient

            grad = p.grad
            if self.world.mesh.fsdp > 1:  # a scalar that FSDP leaves alone
                grad = self.world.sum(grad, "data") / self.world.size("data")
            set_gradient(view, grad)

    def _parameters(self) -> dict[str, nn.Parameter]:
        if not self._in_parts:
            return dict(self.model.named_parameters())
        from transformer_vq.parallel.parts import parameters_in_parts

        return parameters_in_parts(self.model, self._divided, self.world.axes["tp"])

    def whole_model(self) -> TransformerVQ:
        """The model with nothing divided, on the first process; all must call this together."""
        if not self._in_parts:
            return self.model
        tensors = {}
        for name, x in self.model.state_dict().items():
            if name in self._divided:
                x = self.world.gather(x, "tp", self._divided[name])
            x = self.whole(x)
            if self.world.is_rank_zero:
                tensors[name] = x.detach().cpu()
        with torch.device("meta"):
            model = TransformerVQ(self.model.config)
        if self.world.is_rank_zero:
            model.load_state_dict(tensors, assign=True)
        return model

    def whole(self, x: Tensor) -> Tensor:
        """A tensor of the optimizer with nothing divided; all must call this together."""
        if not self._in_parts:
            return x
        from transformer_vq.parallel.parts import whole

        return whole(x)

    def divide(self, x: Tensor, p: Tensor) -> Tensor:
        """A tensor of the optimizer that belongs to parameter p, as this mesh has it."""
        if not self._in_parts:
            return x.to(p.device)
        from transformer_vq.parallel.parts import divide_like

        return divide_like(x.to(p.device), p)

    def whole_state(self, state: ModelState, prefix: str) -> dict[str, Tensor]:
        """The rows of all processes under their names; all must call this together."""
        found = {}
        for name, x in state.to_tensors(prefix).items():
            if (dim := self._state_dim(name)) is not None:
                x = self.world.gather(x, "tp", dim)
            found[name] = x if name.endswith("sinusoid_mask") else self.world.gather(x, "rows", 0)
        return found

    def divide_state(self, tensors: dict[str, Tensor], prefix: str) -> ModelState:
        """This process's part of what `whole_state` made, whatever the mesh was then."""
        found = {}
        for name, x in tensors.items():
            if not name.startswith(f"{prefix}/"):
                continue
            x = x if name.endswith("sinusoid_mask") else self.rows(x)
            dim = self._state_dim(name)
            found[name] = x if dim is None else self.world.part(x, "tp", dim)
        return ModelState.from_tensors(found, prefix)

    def _state_dim(self, name: str) -> int | None:
        """Along which axis tensor parallel divides a tensor of the state."""
        if self.world.size("tp") == 1:
            return None
        field = name.split("/", 3)[-1]  # state0/layers/3/cache/mean
        return STATE[self.model.config.layer.heads.sharded].get(field)
