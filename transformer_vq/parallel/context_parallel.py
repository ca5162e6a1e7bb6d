"""Context parallel: one sequence over many processes, each working on a stretch of it.

The laws of the model make it cheap. What a stretch needs to know of all that came before it is a
state of constant size, so per layer two things cross between processes, whatever the length: the
last L tokens go to the next process, and the cache statistics of the stretches go through an
exclusive scan under the one `merge`. The scan is that of Hillis and Steele: in each of log2(n)
rounds everybody sends one summary 1, 2, 4, ... places up. Gradients go back the same way.
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
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.cache import CacheStats, block_stats, merge
from transformer_vq.ops.ragged import Packing, find_evictions, next_position, read_packing
from transformer_vq.ops.state import AttentionState


class Exchange:
    """What a layer asks for the state before its stretch; `sent` counts bytes for measurements."""

    def __init__(self, group: dist.ProcessGroup, grad_through_cache: bool = True) -> None:
        self.group = group
        self.grad_through_cache = grad_through_cache
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    def __call__(
        self, k_hat: Tensor, z: Tensor, v: Tensor, state: AttentionState, layout: Packing | None
    ) -> AttentionState:
        """The state after everything that lower processes have.

        k_hat: [b, h, t, k], z: [b, h, t] and v: [b, h, t, v] of this stretch. state: on the first
        process what was carried from the window before, elsewhere only its position counts.
        """
        window_len = state.k.shape[-2]
        packed = torch.cat([k_hat, v], dim=-1)[..., -window_len:, :]
        k_in, v_in = self._shift(packed, 1).split([k_hat.shape[-1], v.shape[-1]], dim=-1)
        z_in = self.send(z[..., -window_len:], 1)
        # A choice by value: also the first process must take part in the backward pass.
        is_rank_zero = torch.tensor(self.rank == 0, device=v.device)
        assert state.z is not None
        state = replace(
            state,
            k=torch.where(is_rank_zero, state.k.to(k_in.dtype), k_in),
            v=torch.where(is_rank_zero, state.v.to(v_in.dtype), v_in),
            z=torch.where(is_rank_zero, state.z, z_in),
        )
        if state.cache is None:
            return state
        own = self._leaving(z, v, state, layout)
        below = self._scan(merge(state.cache, own) if self.rank == 0 else own)
        return replace(
            state,
            cache=CacheStats(
                torch.where(is_rank_zero, state.cache.mean, below.mean),
                torch.where(is_rank_zero, state.cache.count, below.count),
            ),
        )

    def _leaving(
        self, z: Tensor, v: Tensor, state: AttentionState, layout: Packing | None
    ) -> CacheStats:
        """What moves from the window into the cache while this stretch is worked on."""
        assert state.z is not None
        assert state.cache is not None
        seq_len, window_len = v.shape[-2], state.k.shape[-2]
        z_all = torch.cat([state.z, z], dim=-1)[..., :seq_len]
        v_all = torch.cat([state.v, v], dim=-2)[..., :seq_len, :]
        later = state.window_valid.new_ones(v.shape[0], seq_len - window_len)
        counted = torch.cat([state.window_valid, later], dim=-1)
        goes_on = carry = state.cache.count.new_ones(v.shape[0], 1)
        if layout is not None:
            leaving = find_evictions(layout, state.position, window_len, n_blocks=1)
            counted = leaving.counted.squeeze(1)
            goes_on = leaving.goes_on.to(carry.dtype).unsqueeze(-1)
            carry = leaving.carry.to(carry.dtype) * goes_on
        n_code = state.cache.count.shape[-1]
        v_all = v_all if self.grad_through_cache else v_all.detach()
        stats = block_stats(z_all, v_all, n_code, counted.unsqueeze(1))
        return CacheStats(stats.mean, stats.count * goes_on.unsqueeze(-1), carry)

    def _scan(self, own: CacheStats) -> CacheStats:
        """The merge of what all lower processes have; nothing, on the first one."""
        below, distance = self._shift_stats(own, 1), 1
        while distance < self.size:
            below = merge(self._shift_stats(below, distance), below)
            distance *= 2
        return below

    def _shift_stats(self, stats: CacheStats, distance: int) -> CacheStats:
        """Means in one message, integers in another. Ranks below the first send zeros: empty."""
        assert stats.carry is not None
        carry = stats.carry.unsqueeze(-1).expand(*stats.count.shape[:-1], 1)
        integers = self.send(torch.cat([stats.count, carry], dim=-1), distance)
        return CacheStats(self._shift(stats.mean, distance), integers[..., :-1], integers[..., -1])

    def _shift(self, x: Tensor, distance: int) -> Tensor:
        received: Tensor = _Shift.apply(x, distance, self)
        return received

    def send(self, x: Tensor, distance: int) -> Tensor:
        """Give x to the process `distance` above, return that of the one below; zeros if none."""
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
    """`Exchange.send` up; the gradient is sent down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distance: int, exchange: Exchange) -> Tensor:
        ctx.distance, ctx.exchange = distance, exchange
        return exchange.send(x, distance)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.send(grad, -ctx.distance), None, None


def exchange_states(model: TransformerVQ, group: dist.ProcessGroup) -> None:
    """From here on, training works on sequences that lie stretch by stretch on the processes."""
    for branch in model.branches:
        if isinstance(branch, VQAttention):
            branch.exchange = Exchange(group, branch.grad_through_cache)


def own_stretch(batch: Batch, state: ModelState, rank: int, size: int) -> tuple[Batch, ModelState]:
    """The part of a window that is worked on here, and where its rows stand before it."""
    if size == 1:
        return batch, state
    length = batch.tokens.shape[1] // size
    start = rank * length
    if batch.valid is not None and bool((batch.valid[:, 1:] > batch.valid[:, :-1]).any()):
        raise UserError("context parallel: padding must stand at the end of rows")
    before = batch.map(lambda x: x[:, :start])
    return batch.map(lambda x: x[:, start : start + length]), after_tokens(state, before)


def after_tokens(state: ModelState, batch: Batch) -> ModelState:
    """Position and document after some tokens; windows and caches are left as they are."""
    n, first = batch.tokens.shape[1], state.layers[0]
    if n == 0:
        return state
    layout = read_packing(first, n, batch.valid, batch.document_ids)
    position = next_position(first.position, n, layout)
    document = first.document if layout is None else layout.document
    layers = (replace(layer, position=position, document=document) for layer in state.layers)
    return replace(state, layers=tuple(layers))


def carry_around(state: ModelState, group: dist.ProcessGroup) -> ModelState:
    """Windows and caches after the last stretch, brought to the first process for what follows.

    Elsewhere they stay what they were: there nobody looks at them.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank not in (0, last):
        return state
    operation, peer = (dist.isend, 0) if rank == last else (dist.irecv, last)
    layers = []
    for layer in state.layers:
        assert layer.z is not None
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
