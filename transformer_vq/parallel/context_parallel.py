"""Context parallelism: each rank processes a shard of every sequence.

A shard depends on all earlier tokens only through a state of constant size. So per layer, ranks
exchange two things whatever the length: the last L tokens go to the next rank, and the cache
statistics of the shards go through an exclusive scan under `merge`. The scan is that of Hillis and
Steele: in each of log2(n) rounds, every rank sends one message 1, 2, 4, ... ranks up. Gradients
travel the same way back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_vq.data.batches import Batch
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.ops.cache import CacheStats, block_stats, merge
from transformer_vq.ops.packing import AttentionInputs, find_evictions, next_position, read_packing
from transformer_vq.ops.runtime import is_readable
from transformer_vq.ops.state import VQState


class Exchange:
    """Computes the state before this rank's shard; `sent` counts bytes for measurements."""

    def __init__(self, group: dist.ProcessGroup, grad_through_cache: bool = True) -> None:
        self.group = group
        self.grad_through_cache = grad_through_cache
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    def __call__(self, inputs: AttentionInputs, state: VQState) -> VQState:
        """Return the state after all tokens of lower ranks.

        inputs: of this rank's shard. state: on rank 0 the state carried from the previous span;
        on other ranks only its position is used.
        """
        k_hat, z, v = inputs.k_hat, inputs.z, inputs.v
        window_len = state.k.shape[-2]
        packed = torch.cat([k_hat, v], dim=-1)[..., -window_len:, :]
        k_in, v_in = self._shift(packed, 1).split([k_hat.shape[-1], v.shape[-1]], dim=-1)
        z_in = self.send(z[..., -window_len:], 1)
        # Selected by value, because rank 0 must take part in the backward pass too.
        is_rank_zero = torch.full((), self.rank == 0, device=v.device)
        state = replace(
            state,
            k=torch.where(is_rank_zero, state.k.to(k_in.dtype), k_in),
            v=torch.where(is_rank_zero, state.v.to(v_in.dtype), v_in),
            z=torch.where(is_rank_zero, state.z, z_in),
        )
        if state.cache is None:
            return state
        own = self._evicted(inputs, state)
        below = self._scan(merge(state.cache, own) if self.rank == 0 else own)
        return replace(
            state,
            cache=CacheStats(
                torch.where(is_rank_zero, state.cache.mean, below.mean),
                torch.where(is_rank_zero, state.cache.count, below.count),
            ),
        )

    def _evicted(self, inputs: AttentionInputs, state: VQState) -> CacheStats:
        """Return the statistics of the tokens evicted to the cache within this shard."""
        assert state.cache is not None
        seq_len = inputs.seq_len
        z = torch.cat([state.z, inputs.z], dim=-1)[..., :seq_len]
        v = torch.cat([state.v, inputs.v], dim=-2)[..., :seq_len, :]
        evicted = find_evictions(state, inputs.packing, seq_len, n_blocks=1)
        kept = carry = state.cache.count.new_ones(v.shape[0], 1)
        if evicted.kept is not None and evicted.carry is not None:
            kept = evicted.kept.unsqueeze(-1)
            carry = evicted.carry * kept
        v = v if self.grad_through_cache else v.detach()
        stats = block_stats(z, v, state.cache.count.shape[-1], evicted.counted)
        return CacheStats(stats.mean, stats.count * kept.unsqueeze(-1), carry)

    def _scan(self, own: CacheStats) -> CacheStats:
        """Return the merged statistics of all lower ranks; empty on rank 0."""
        below, distance = self._shift_stats(own, 1), 1
        while distance < self.size:
            below = merge(self._shift_stats(below, distance), below)
            distance *= 2
        return below

    def _shift_stats(self, stats: CacheStats, distance: int) -> CacheStats:
        """Send means and integers in two messages; a missing peer counts as empty (zeros)."""
        assert stats.carry is not None
        carry = stats.carry.unsqueeze(-1).expand(*stats.count.shape[:-1], 1)
        integers = self.send(torch.cat([stats.count, carry], dim=-1), distance)
        return CacheStats(self._shift(stats.mean, distance), integers[..., :-1], integers[..., -1])

    def _shift(self, x: Tensor, distance: int) -> Tensor:
        received: Tensor = _Shift.apply(x, distance, self)  # type: ignore[no-untyped-call]
        return received

    def send(self, x: Tensor, distance: int) -> Tensor:
        """Send x to the rank `distance` above; return that of the rank below, zeros if none."""
        x = x.contiguous()
        received = torch.zeros_like(x)
        operations = []
        for peer, operation, tensor in (
            (self.rank + distance, dist.isend, x),
            (self.rank - distance, dist.irecv, received),
        ):
            if 0 <= peer < self.size:
                operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))
        if 0 <= self.rank + distance < self.size:
            self.sent += x.numel() * x.element_size()
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received


class _Shift(torch.autograd.Function):
    """Send up; send the gradient down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distance: int, exchange: Exchange) -> Tensor:
        ctx.distance, ctx.exchange = distance, exchange
        return exchange.send(x, distance)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.send(grad, -ctx.distance), None, None


def exchange_states(model: TransformerVQ, group: dist.ProcessGroup) -> None:
    """Make training treat each batch as this rank's shard of its sequences."""
    for branch in model.branches:
        if isinstance(branch, VQAttention):
            branch.exchange = Exchange(group, branch.config.grad_through_cache)


def own_shard(batch: Batch, state: ModelState, rank: int, size: int) -> tuple[Batch, ModelState]:
    """Return this rank's shard of a span, and the state with the positions before it."""
    if size == 1:
        return batch, state
    before = batch.map(lambda x: x[:, : rank * (x.shape[1] // size)])
    return own_columns(batch, rank, size), after_tokens(state, before)


def own_columns(batch: Batch, rank: int, size: int) -> Batch:
    """Return this rank's shard of a span; padding is checked while it is on the host."""
    length, valid = batch.tokens.shape[1] // size, batch.valid
    if size > 1 and valid is not None and is_readable(valid) and _has_inner_padding(valid):
        raise UserError("parallel.cp: padding must be at the end of rows")
    return batch.map(lambda x: x[:, rank * length : (rank + 1) * length])


def _has_inner_padding(valid: Tensor) -> bool:
    """Return whether padding is followed by a token in any row."""
    return bool((valid[:, 1:] > valid[:, :-1]).any())


def after_tokens(state: ModelState, batch: Batch) -> ModelState:
    """Return the state with position and document after some tokens; nothing else changes."""
    n, first = batch.tokens.shape[1], state.layers[0]
    if n == 0:
        return state
    packing = read_packing(first, n, batch.valid, batch.document_ids)
    position = next_position(first.position, n, packing)
    document = first.document if packing is None else packing.document
    layers = (replace(layer, position=position, document=document) for layer in state.layers)
    return replace(state, layers=tuple(layers))


def pass_to_first_rank(state: ModelState, group: dist.ProcessGroup) -> ModelState:
    """Send the windows and caches of the last rank to rank 0, for the next span.

    On other ranks they stay as they are, because they are not used there.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank not in (0, last):
        return state
    operation, peer = (dist.isend, 0) if rank == last else (dist.irecv, last)
    layers = []
    for layer in state.layers:
        assert isinstance(layer, VQState)
        tensors = [layer.k, layer.v, layer.z]
        if layer.cache is not None:
            tensors += [layer.cache.mean, layer.cache.count]
        tensors = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        for work in dist.batch_isend_irecv(
            [dist.P2POp(operation, x, group=group, group_peer=peer) for x in tensors]
        ):
            work.wait()
        k, v, z, *cache = tensors
        layers.append(replace(layer, k=k, v=v, z=z, cache=CacheStats(*cache) if cache else None))
    return replace(state, layers=tuple(layers))
