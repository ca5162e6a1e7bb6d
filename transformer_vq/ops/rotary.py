"""Attention with rotary positions: two kinds of scores under one softmax, in linear time.

A key within distance L of a query has the score of RoPE, R^i q . R^j k, with its exact key. A key
further away has the score R^p q . k, in which the position p is constant and the key is not
rotated. So scores beyond L depend on the key alone, and the cache of Theorem 3.7 applies: a key
k_j is replaced by its code when it is evicted, R^p q . c_z + bias_z.

Some evicted tokens stay exact, in slots: the first n_sink tokens of a document, and the newest
n_exact tokens of kind EXACT. A token that leaves its slot is merged into the cache. Whether a token
is exact for a query follows from their positions, so results do not depend on where blocks begin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops import packing as pack
from transformer_vq.ops.cache import accumulation_dtype, block_stats, merge
from transformer_vq.ops.packing import Packing
from transformer_vq.ops.state import CODED, EXACT, SINK, RotaryState, Slots


@dataclass(frozen=True)
class RotaryInputs:
    """One segment. q: [b, h, g, t, k] and k: [b, h, t, k] before their rotation, z: [b, h, t],
    v: [b, h, t, v], kind: [b, h, t] (`token_kind`), codebook: [h, s, k], code_bias: [h, s], table:
    `rotations`.
    """

    q: Tensor
    k: Tensor
    z: Tensor
    v: Tensor
    kind: Tensor
    codebook: Tensor
    code_bias: Tensor
    table: Tensor
    packing: Packing | None = None

    def split(self, lens: list[int]) -> list[RotaryInputs]:
        """Return consecutive segments with these lengths."""
        if len(lens) == 1:
            return [self]
        q, k, v = (x.split(lens, -2) for x in (self.q, self.k, self.v))
        z, kind = (x.split(lens, -1) for x in (self.z, self.kind))
        packings = [None] * len(lens) if self.packing is None else self.packing.split(lens)
        parts = zip(q, k, z, v, kind, packings, strict=True)
        return [
            replace(self, q=q, k=k, z=z, v=v, kind=kind, packing=packing)
            for q, k, z, v, kind, packing in parts
        ]


def rotations(positions: Tensor, d_k: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return cosines, then sines of the angles of RoPE. positions: [t] -> [t, d_k]."""
    exponents = torch.arange(0, d_k, 2, device=positions.device, dtype=torch.float64) / d_k
    angles = positions.double().unsqueeze(-1) * theta**-exponents
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def block_rotations(
    seq_len: int, window_len: int, far: int, d_k: int, theta: float, like: Tensor
) -> Tensor:
    """Return the table of `RotaryInputs`: window and block, then the far position."""
    places = torch.arange(window_len + min(seq_len, window_len) + 1, device=like.device)
    places[-1] = far
    return rotations(places, d_k, theta, accumulation_dtype(like.dtype))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Return R x, in the half-split convention. x: [..., t, k], table: [t, k]."""
    cos, sin = table.chunk(2, dim=-1)
    a, b = x.to(table.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def token_kind(
    error: Tensor, threshold: Tensor, position: Tensor, n_sink: int, n_exact: int
) -> Tensor:
    """Return the kind of each token. error: [b, h, t], threshold: [h], position: [b, t]."""
    is_exact = (error > threshold.unsqueeze(-1)) & (n_exact > 0)
    kind = is_exact.to(torch.int8)  # CODED or EXACT
    return kind.masked_fill((position < n_sink).unsqueeze(1), SINK)


def rotary_attention(
    inputs: RotaryInputs, state: RotaryState, n_sink: int, grad_through_cache: bool = True
) -> tuple[Tensor, RotaryState]:
    """Return W V for the next segment of a sequence, [b, h, g, t, v], and the state after it.

    n_sink: number of slots for attention sinks; the others are for tokens of kind EXACT. A state
    without a cache limits attention to the last L tokens and the sinks.
    """
    window_len, seq_len = state.k.shape[-2], inputs.q.shape[-2]
    outputs = []
    for block in inputs.split(pack.segment_lens(seq_len, window_len, window_len)):
        outputs.append(_attend_block(block, state, n_sink, grad_through_cache))
        state = _evict(block, state, n_sink, grad_through_cache)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state


def _attend_block(
    block: RotaryInputs, state: RotaryState, n_sink: int, grad_through_cache: bool
) -> Tensor:
    """Attend from at most L queries to the cache, the slots, the window and the block."""
    window_len, n, dtype = state.k.shape[-2], block.q.shape[-2], block.v.dtype
    doc_start = -state.position.unsqueeze(-1).expand(-1, n)  # relative to the block
    if block.packing is not None:
        doc_start = block.packing.doc_start
    doc_start = doc_start[:, None, None, :, None]  # [b, 1, 1, i, 1]

    # 1. Scores of the keys in window and block, rotated to their places.
    slots, n_slot = state.slots, state.slots.k.shape[-2]
    k = torch.cat([state.k.to(dtype), block.k], dim=-2)
    v = torch.cat([state.v.to(dtype), block.v], dim=-2)
    table, far = block.table[: window_len + n], block.table[-1:]
    keys, query = rotate(k, table), rotate(block.q, table[window_len:])
    near = torch.einsum("bhgik,bhjk->bhgij", query, keys)

    # 2. Scores of codes, and of evicted tokens: with their key, or else with their code.
    far_q = rotate(block.q, far)
    of_codes = torch.einsum("bhgik,hsk->bhgis", far_q, block.codebook.to(dtype))
    of_codes = of_codes + block.code_bias.to(dtype)[:, None, None]
    if state.cache is None:
        of_codes = torch.full_like(of_codes, -torch.inf)
    n_far = n_slot + n - 1  # the last query evicts n - 1 tokens of the window
    z = torch.cat([slots.z, state.z], dim=-1)[..., :n_far]
    of_far = of_codes.gather(-1, z[:, :, None, None].expand(*of_codes.shape[:-1], n_far))
    if n_slot > 0:
        exact = torch.cat([slots.k.to(dtype), k], dim=-2)[..., :n_far, :]
        of_exact = torch.einsum("bhgik,bhjk->bhgij", far_q, exact)
        of_far = torch.where(_is_exact(state, n, n_sink), of_exact, of_far)
    of_slots, of_window = of_far.split([n_slot, n - 1], dim=-1)

    # 3. What a query sees: nothing after itself and before its document; slots that are filled.
    steps = torch.arange(-window_len, n, device=v.device)
    distance = steps[window_len:, None] - steps
    is_far = distance[:, : n - 1] > window_len
    near = torch.cat([torch.where(is_far, of_window, near[..., : n - 1]), near[..., n - 1 :]], -1)
    near = near.masked_fill((distance < 0) | (steps < doc_start), -torch.inf)
    age = slots.age[:, :, None, None]  # [b, h, 1, 1, e]
    of_slots = of_slots.masked_fill((age == 0) | (-age < doc_start), -torch.inf)

    # 4. One softmax over codes, slots and local keys, then the weighted sum of their values.
    scores, values = [of_slots, near], [slots.v.to(dtype), v]
    if state.cache is not None:
        log_count = state.cache.count.to(accumulation_dtype(dtype)).log()  # log 0 = -inf
        of_cache = of_codes + log_count[:, :, None, None]
        scores.append(of_cache.masked_fill(doc_start >= -window_len, -torch.inf))
        mean = state.cache.mean if grad_through_cache else state.cache.mean.detach()
        values.append(mean.to(dtype))
    columns = torch.cat([x.to(accumulation_dtype(dtype)) for x in scores], dim=-1)
    parts = columns.softmax(-1).to(dtype).split([x.shape[-1] for x in scores], dim=-1)
    pairs = zip(parts, values, strict=True)
    return reduce(torch.add, (torch.einsum("bhgij,bhjv->bhgiv", w, x) for w, x in pairs))


def _slot_kind(slots: Slots, n_sink: int) -> Tensor:
    """Return the kinds of the tokens in slots: [b, h, e] of int8; CODED for empty slots."""
    kind = torch.full_like(slots.z, EXACT, dtype=torch.int8)
    kind[..., :n_sink] = SINK
    return kind.masked_fill(slots.age == 0, CODED)


def _is_exact(state: RotaryState, n: int, n_sink: int) -> Tensor:
    """Return which evicted tokens are exact for each of n queries: [b, h, 1, i, e + n - 1]."""
    n_slot = state.slots.k.shape[-2]
    kind = torch.cat([_slot_kind(state.slots, n_sink), state.kind], dim=-1)
    so_far = (kind == EXACT).cumsum(-1)
    kind, own = (x[..., : n_slot + n - 1].unsqueeze(-2) for x in (kind, so_far))
    # Before query i, the slots and the oldest i tokens of the window have been evicted.
    evicted = F.pad(so_far, (1, 0))[..., n_slot : n_slot + n].unsqueeze(-1)
    is_kept = (kind == EXACT) & (evicted - own < n_slot - n_sink)
    return ((kind == SINK) | is_kept).unsqueeze(2)


def _evict(
    block: RotaryInputs, state: RotaryState, n_sink: int, grad_through_cache: bool
) -> RotaryState:
    """Return the state after a block: its length of tokens leaves the window.

    They move to a slot or are merged into the cache, as are tokens that leave a slot. Only tokens
    of the current document are kept.
    """
    window_len, n, slots, packing = state.k.shape[-2], block.q.shape[-2], state.slots, block.packing
    length = None if packing is None else packing.length
    n_token = state.position.new_full(state.position.shape, n) if length is None else length
    start = -state.position if packing is None else packing.last_start(state.position)
    n_token, start = n_token.view(-1, 1, 1), start.view(-1, 1, 1)  # [b, 1, 1]

    # Places are relative to the block. `newer` counts the newer tokens of kind EXACT.
    n_slot, column = slots.k.shape[-2], torch.arange(n, device=start.device)
    oldest = (column - window_len).expand(*slots.age.shape[:2], -1)
    place = torch.cat([-slots.age, oldest], dim=-1)  # [b, h, e + n]
    is_out = torch.cat([slots.age > 0, (column < n_token).expand_as(oldest)], dim=-1)
    is_out = is_out & (place >= start)
    kind = torch.cat([_slot_kind(slots, n_sink), state.kind[..., :n]], dim=-1)
    z = torch.cat([slots.z, state.z[..., :n]], dim=-1)
    v = torch.cat([slots.v.to(state.v.dtype), state.v[..., :n, :]], dim=-2)
    is_exact = is_out & (kind == EXACT)
    newer = is_exact.sum(-1, keepdim=True) - is_exact.cumsum(-1)
    is_kept = (is_exact & (newer < n_slot - n_sink)) | (is_out & (kind == SINK))

    cache = state.cache
    if cache is not None:
        merged = v if grad_through_cache else v.detach()
        evicted = block_stats(z, merged, cache.count.shape[-1], is_out & ~is_kept)
        cache = cache if grad_through_cache else cache.detach()
        carry = (start < -window_len).squeeze(-1).to(torch.int64).expand(*z.shape[:2])
        cache = replace(merge(cache, replace(evicted, carry=carry)), carry=None)
    if n_slot > 0:
        # Sinks stand in the order of their positions, the other tokens in the last slots. The
        # column after the slots takes all tokens that are not kept.
        slot = torch.where(kind == SINK, place - start, n_slot - 1 - newer)
        slot = torch.where(is_kept, slot, n_slot)
        order = torch.arange(slot.shape[-1], device=slot.device).expand_as(slot)
        empty = slot.new_zeros(*slot.shape[:2], n_slot + 1)
        source = empty.scatter(-1, slot, order)[..., :n_slot]
        is_filled = empty.scatter(-1, slot, is_kept.long())[..., :n_slot]
        k = torch.cat([slots.k.to(state.k.dtype), state.k[..., :n, :]], dim=-2)
        rows = source.unsqueeze(-1)
        slots = Slots(
            k.gather(2, rows.expand(*source.shape, k.shape[-1])),
            v.gather(2, rows.expand(*source.shape, v.shape[-1])),
            z.gather(2, source),
            (n_token - place.gather(2, source)) * is_filled,
        )
    return replace(
        state,
        k=pack.newest(state.k, block.k, window_len, length, dim=-2),
        v=pack.newest(state.v, block.v, window_len, length, dim=-2),
        z=pack.newest(state.z, block.z, window_len, length, dim=-1),
        kind=pack.newest(state.kind, block.kind, window_len, length, dim=-1),
        position=pack.next_position(state.position, n, packing),
        cache=cache,
        slots=slots,
    )


def quadratic_rotary_attention(
    q: Tensor,
    k: Tensor,
    k_code: Tensor,
    v: Tensor,
    bias: Tensor,
    kind: Tensor,
    *,
    window_len: int,
    far: int,
    n_exact: int,
    theta: float,
) -> Tensor:
    """Return what `rotary_attention` computes for a full sequence, in O(T^2): its definition.

    q: [b, h, g, t, k], k and k_code: [b, h, t, k], exact keys and their codewords, v: [b, h, t, v],
    bias: [b, h, t] of the codes, kind: [b, h, t].
    """
    steps = torch.arange(q.shape[-2], device=q.device)
    distance = steps[:, None] - steps
    table = rotations(steps, q.shape[-1], theta, q.dtype)
    near = torch.einsum("bhgik,bhjk->bhgij", rotate(q, table), rotate(k, table))
    far_q = rotate(q, rotations(steps.new_full((1,), far), q.shape[-1], theta, q.dtype))
    of_exact = torch.einsum("bhgik,bhjk->bhgij", far_q, k)
    of_codes = torch.einsum("bhgik,bhjk->bhgij", far_q, k_code) + bias[:, :, None, None]
    is_evicted = distance > window_len
    is_newer = (steps > steps[:, None])[None] & is_evicted[:, None]  # [i, j, newer token]
    newer = torch.einsum("ijn,bhn->bhij", is_newer.double(), (kind == EXACT).double())
    kind = kind.unsqueeze(-2)
    is_exact = (kind == SINK) | ((kind == EXACT) & (newer < n_exact))
    scores = torch.where(is_exact.unsqueeze(2), of_exact, of_codes)
    scores = torch.where(is_evicted, scores, near).masked_fill(distance < 0, -torch.inf)
    return torch.einsum("bhgij,bhjv->bhgiv", scores.softmax(-1), v)
