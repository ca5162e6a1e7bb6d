"""Context parallelism: each rank processes a shard of every sequence.

A shard depends on all earlier tokens only through a state of constant size. So per layer, ranks
exchange two things whatever the length: the last L tokens go to the next rank, and the cache
statistics of all shards are gathered, of which each rank merges those below it. The collectives are
differentiable and can be compiled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, all_to_all_single
from torch.utils._pytree import tree_map_only

from transformer_vq.data.batches import Batch
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.ops.cache import CacheStats, block_stats, merge
from transformer_vq.ops.packing import AttentionInputs, find_evictions, next_position, read_packing
from transformer_vq.ops.runtime import is_readable
from transformer_vq.ops.state import VQState


class Exchange:
    """Computes the state before this rank's shard."""

    def __init__(self, group: dist.ProcessGroup, grad_through_cache: bool = True) -> None:
        self.group = group
        self.grad_through_cache = grad_through_cache
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, inputs: AttentionInputs, state: VQState) -> VQState:
        """Return the state after all tokens of lower ranks.

        inputs: of this rank's shard. state: on rank 0 the state carried from the previous span;
        on other ranks only its position is used.
        """
        k_hat, z, v = inputs.k_hat, inputs.z, inputs.v
        window_len = state.k.shape[-2]
        packed = torch.cat([k_hat, v], dim=-1)[..., -window_len:, :]
        k_in, v_in = self._shift(packed).split([k_hat.shape[-1], v.shape[-1]], dim=-1)
        z_in = self._shift(z[..., -window_len:])
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
        shards = self._gather(merge(state.cache, own) if self.rank == 0 else own)
        below = reduce(merge, shards[: max(self.rank, 1)])
        mean = torch.where(is_rank_zero, state.cache.mean, below.mean)
        count = torch.where(is_rank_zero, state.cache.count, below.count)
        return replace(state, cache=CacheStats(mean, count))

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

    def _gather(self, own: CacheStats) -> list[CacheStats]:
        """Return the statistics of all ranks, means and integers in one message each."""
        assert own.carry is not None
        carry = own.carry.unsqueeze(-1).expand(*own.count.shape[:-1], 1)
        integers = torch.cat([own.count, carry], dim=-1)
        both = [x.contiguous().unsqueeze(0) for x in (own.mean, integers)]
        shards = zip(*(all_gather_single(x, 0, self.group).unbind() for x in both), strict=True)
        return [CacheStats(mean, x[..., :-1], x[..., -1]) for mean, x in shards]

    def _shift(self, x: Tensor) -> Tensor:
        """Return the x of the rank below; rank 0 gets that of the last rank."""
        above, below = ((self.rank + step) % self.size for step in (1, -1))
        sent, received = (
            [x.numel() if rank == peer else 0 for rank in range(self.size)]
            for peer in (above, below)
        )
        return all_to_all_single(x.flatten(), received, sent, self.group).view_as(x)


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
    length, mask = batch.tokens.shape[1] // size, batch.valid
    if size > 1 and mask is not None and is_readable(mask) and (mask[:, 1:] > mask[:, :-1]).any():
        raise UserError("parallel.cp: padding must be at the end of rows")
    return batch.map(lambda x: x[:, rank * length : (rank + 1) * length])


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


def share_last(state: ModelState, group: dist.ProcessGroup) -> ModelState:
    """Send the windows and caches of the last rank to all ranks, for the next span."""

    def shared(x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=group, group_src=dist.get_world_size(group) - 1)
        return x

    layers = []
    for layer in state.layers:
        fields = {name: getattr(layer, name) for name in ("k", "v", "z", "cache")}
        layers.append(replace(layer, **tree_map_only(Tensor, shared, fields)))
    return replace(state, layers=tuple(layers))
