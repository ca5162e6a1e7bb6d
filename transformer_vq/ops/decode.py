"""Decode one token in place: Theorem 3.7 for a block of one token; nothing grows.

The window is a ring of L + 1 slots, so that a token attends to itself and the L tokens before it in
one product. The slot after the current one holds the oldest token, which is evicted to the cache.
The result equals that of `vq_attention` on a segment of length one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops.cache import CacheStats, accumulation_dtype, merge
from transformer_vq.ops.inputs import AttentionInputs
from transformer_vq.ops.quadratic import attention_weights
from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class Ring:
    """An attention state that is updated in place.

    k: [b, h, L + 1, k], v: [b, h, L + 1, v], z: [b, h, L + 1], position: [b], and the cache.
    slot: [1], the free slot for the next token; the slot after it holds the oldest token. It is a
    tensor, so that a compiled step is the same at every position.
    """

    k: Tensor
    v: Tensor
    z: Tensor
    position: Tensor
    cache: CacheStats | None
    slot: Tensor

    @classmethod
    def of(cls, state: AttentionState) -> Ring:
        """Copy a state."""
        assert state.z is not None
        cache = state.cache
        return cls(
            k=F.pad(state.k, (0, 0, 1, 0)),
            v=F.pad(state.v, (0, 0, 1, 0)),
            z=F.pad(state.z, (1, 0)),
            position=state.position.clone(),
            cache=None if cache is None else _copy(cache),
            slot=torch.zeros(1, dtype=torch.int64, device=state.k.device),
        )

    def write_row_(self, row: int, state: AttentionState) -> None:
        """Replace one row by a state of one row, at the places of the current slot."""
        assert state.z is not None
        order = self._order()
        self.k[row].index_copy_(-2, order, state.k[0])
        self.v[row].index_copy_(-2, order, state.v[0])
        self.z[row].index_copy_(-1, order, state.z[0])
        self.position[row] = state.position[0]
        if self.cache is not None and state.cache is not None:
            self.cache.mean[row] = state.cache.mean[0]
            self.cache.count[row] = state.cache.count[0]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the ring."""
        yield from (self.k, self.v, self.z, self.position, self.slot)
        if self.cache is not None:
            yield from (self.cache.mean, self.cache.count)

    def _order(self) -> Tensor:
        """Return the slots of the window, from the oldest token to the newest."""
        n_slots = self.k.shape[-2]
        return (self.slot + torch.arange(1, n_slots, device=self.slot.device)) % n_slots

    def state(self) -> AttentionState:
        """Return a copy as an attention state."""
        order = self._order()
        return AttentionState(
            k=self.k.index_select(-2, order),
            v=self.v.index_select(-2, order),
            z=self.z.index_select(-1, order),
            position=self.position.clone(),
            cache=None if self.cache is None else _copy(self.cache),
        )


def attend_one_(inputs: AttentionInputs, ring: Ring) -> Tensor:
    """Attend from one token per row to the cache, the window and itself; update the ring.

    inputs without the axis of tokens, q: [b, h, g, k], k_hat: [b, h, k], z: [b, h], v: [b, h, v],
    by_distance: [b, h, g, L + 1] -> [b, h, g, v].
    """
    q, v = inputs.q, inputs.v
    n_slots = ring.k.shape[-2]
    ring.k.index_copy_(-2, ring.slot, inputs.k_hat.unsqueeze(-2))
    ring.v.index_copy_(-2, ring.slot, v.unsqueeze(-2))
    ring.z.index_copy_(-1, ring.slot, inputs.z.unsqueeze(-1))

    # Column j of by_distance is for distance L - j: that of the token j + 1 slots after this one.
    column = (torch.arange(n_slots - 1, 2 * n_slots - 1, device=q.device) - ring.slot) % n_slots
    filled = column >= n_slots - 1 - ring.position.unsqueeze(-1)  # [b, L + 1]
    scores = q @ ring.k.mT
    if inputs.by_distance is not None:
        scores = scores + inputs.by_distance.index_select(-1, column)
    multiplicity = filled.to(accumulation_dtype(v.dtype)).unsqueeze(1)  # [b, 1, L + 1]
    if ring.cache is None:
        output = attention_weights(scores, None, multiplicity).to(v.dtype) @ ring.v
    else:
        multiplicity = multiplicity.expand(-1, q.shape[1], -1)
        weights = attention_weights(
            torch.cat([scores, q @ inputs.codebook.mT], dim=-1),
            None,
            torch.cat([multiplicity, ring.cache.count], dim=-1),
        ).to(v.dtype)
        output = weights[..., :n_slots] @ ring.v
        output += weights[..., n_slots:] @ ring.cache.mean.to(v.dtype)

    ring.slot.add_(1).remainder_(n_slots)
    if ring.cache is not None:
        _evict_(
            ring.cache,
            ring.z.index_select(-1, ring.slot),
            ring.v.index_select(-2, ring.slot),
            ring.position >= n_slots - 1,
        )
    ring.position.add_(1)
    return output


def _evict_(cache: CacheStats, z: Tensor, v: Tensor, counted: Tensor) -> None:
    """Merge one token per row and head into the cache, for the rows where `counted` is True.

    z: [b, h, 1], v: [b, h, 1, v], counted: [b].
    """
    place = z.unsqueeze(-1).expand(v.shape)
    before = CacheStats(cache.mean.gather(-2, place), cache.count.gather(-1, z))
    count = counted.to(cache.count.dtype).view(-1, 1, 1).expand(z.shape)
    after = merge(before, CacheStats(v.to(cache.mean.dtype), count))
    cache.mean.scatter_(-2, place, after.mean)
    cache.count.scatter_(-1, z, after.count)


def _copy(cache: CacheStats) -> CacheStats:
    return CacheStats(cache.mean.clone(), cache.count.clone())
