"""One token of causal attention in place: Theorem 3.7 for a block of one, without allocations.

The window is a ring: the new token takes the slot of the oldest, which the cache swallows. The
result is that of `vq_attention` on a segment of length one, and nothing grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_vq.ops.cache import CacheStats
from transformer_vq.ops.quadratic import attention_weights
from transformer_vq.ops.state import AttentionState


@dataclass
class Ring:
    """An attention state that is changed in place; its oldest token stands at slot `step % L`.

    k: [b, h, L, k], v: [b, h, L, v], z: [b, h, L], position: [b], and the cache.
    """

    k: Tensor
    v: Tensor
    z: Tensor
    position: Tensor
    cache: CacheStats | None
    step: int = 0

    @classmethod
    def of(cls, state: AttentionState) -> Ring:
        """A copy of a state, in which the oldest token stands first."""
        assert state.z is not None
        return cls(
            state.k.clone(),
            state.v.clone(),
            state.z.clone(),
            state.position.clone(),
            _copy(state.cache),
        )

    def state(self) -> AttentionState:
        """A copy as `vq_attention` takes it."""
        slot = self.step % self.k.shape[-2]
        return AttentionState(
            k=self.k.roll(-slot, dims=-2),
            v=self.v.roll(-slot, dims=-2),
            z=self.z.roll(-slot, dims=-1),
            position=self.position.clone(),
            cache=_copy(self.cache),
        )


def attend_one_(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor,
    ring: Ring,
) -> Tensor:
    """Attention of one token per row to cache, window and itself; the ring takes the token in.

    q: [b, h, g, k], k_hat: [b, h, k], z: [b, h], v: [b, h, v], codebook: [h, s, k],
    by_distance: [b, h, g, L + 1] for distances L, ..., 0 -> [b, h, g, v].
    """
    window_len = ring.k.shape[-2]
    slot = ring.step % window_len
    age = (slot - 1 - torch.arange(window_len, device=q.device)) % window_len  # 0 is the newest
    filled = (age < ring.position.unsqueeze(-1)).unsqueeze(1)  # [b, 1, L]

    # From the oldest slot on, the ring holds distances L, ..., 1.
    bias = by_distance[..., :-1].roll(slot, dims=-1)
    scores = [
        torch.einsum("bhgk,bhjk->bhgj", q, ring.k) + bias,
        torch.einsum("bhgk,bhk->bhg", q, k_hat).unsqueeze(-1) + by_distance[..., -1:],
    ]
    one = torch.ones((), dtype=torch.float32, device=q.device)
    multiplicity = [filled * one, one.expand(*filled.shape[:-1], 1)]
    values = [ring.v, v.unsqueeze(-2)]
    if ring.cache is not None:
        scores.append(torch.einsum("bhgk,hsk->bhgs", q, codebook))
        multiplicity.append(ring.cache.count)
        values.append(ring.cache.mean.to(v.dtype))
    n = torch.cat([m.expand(-1, q.shape[1], -1) for m in multiplicity], dim=-1)
    weights = attention_weights(torch.cat(scores, dim=-1), None, n).to(v.dtype)
    parts = weights.split([s.shape[-1] for s in scores], dim=-1)
    output = torch.einsum("bhgj,bhjv->bhgv", parts[0], values[0])
    for part, value in zip(parts[1:], values[1:], strict=True):
        output = output + torch.einsum("bhgj,bhjv->bhgv", part, value)

    if ring.cache is not None:
        leaves = ring.position >= window_len
        _swallow_(ring.cache, ring.z[..., slot], ring.v[..., slot, :], leaves.unsqueeze(-1))
    ring.k[..., slot, :] = k_hat
    ring.v[..., slot, :] = v
    ring.z[..., slot] = z
    ring.position += 1
    ring.step += 1
    return output


def _swallow_(cache: CacheStats, z: Tensor, v: Tensor, counted: Tensor) -> None:
    """Merge one token per row and head into the cache. z: [b, h], v: [b, h, v], counted: [b, 1]."""
    place = z.unsqueeze(-1)
    more = counted.to(cache.count.dtype).expand_as(z).unsqueeze(-1)
    cache.count.scatter_add_(-1, place, more)
    share = more / cache.count.gather(-1, place).clamp(min=1)
    place = place.unsqueeze(-1).expand(*z.shape, 1, v.shape[-1])
    mean = cache.mean.gather(-2, place)
    new = torch.lerp(mean, v.to(mean.dtype).unsqueeze(-2), share.unsqueeze(-1))
    cache.mean.scatter_(-2, place, new)


def _copy(cache: CacheStats | None) -> CacheStats | None:
    return None if cache is None else CacheStats(cache.mean.clone(), cache.count.clone())
