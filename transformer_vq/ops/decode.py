"""Decode one token in place: Theorem 3.7 for a block of one token; nothing grows.

A step is bound by memory: it reads all weights and all of the state once. So the layout serves one
product per layer: the window, a ring of L + 1 slots, and the means of the cache are rows of one
table. A token attends to itself, the L tokens before it and the cache with one softmax. Keys in the
window are codewords, so their scores are looked up among those of the codebook.

The slot of a token follows from its position alone, so a row is computed in the same order, and
rounded in the same way, whenever it was written next to others.

The free slot still holds the token that has left the window; it is evicted to the cache when the
next token overwrites it. Then each buffer is written once per step, which torch.compile does in
place; a second write to a buffer would make it copy all of it.

The result equals that of `vq_attention` on a segment of length one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops.cache import CacheStats, accumulation_dtype, lookup, merge
from transformer_vq.ops.runtime import is_readable
from transformer_vq.ops.state import VQState


@dataclass(frozen=True)
class DecodeState:
    """The attention states of n layers, updated in place. Rows and heads are one axis, r = b h.

    values: [r, L + 1 + S, v] per layer, the slots of the window and the means of the cache; without
    a cache only the slots. z: [r, L + 1] per layer, codes in the window. log_count: [n r, columns],
    the logarithm of the number of tokens in each row of values. position: [b], a tensor, so that a
    compiled step is the same at every position.
    """

    values: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    log_count: Tensor
    position: Tensor
    n_pending: Tensor  # tokens in the free slot that are to be evicted, 0 or 1: [b] of int64
    count: Tensor | None  # number of tokens per code, [n r, S]; None without a cache
    mean: tuple[Tensor, ...] | None
    """Means in float32 or better, [r, S, v] per layer, if those in `values` have fewer bits."""
    k: tuple[Tensor, ...] | None
    """Keys in the window, [r, L + 1, k] per layer; None if all are known to be codewords."""

    @classmethod
    def of(
        cls,
        states: Sequence[VQState],
        codebooks: Sequence[Tensor],
        dtype: torch.dtype | None = None,
    ) -> DecodeState:
        """Copy the states of all layers. codebooks: [h, s, k] each. dtype: that of the values."""
        dtype = states[0].v.dtype if dtype is None else dtype
        exact = accumulation_dtype(dtype)
        position = states[0].position.clone()
        n_head, window_len = states[0].v.shape[1:3]
        n = window_len + 1
        # Slot j % n holds token j; column 0 of a padded window is for the free slot.
        columns = (torch.arange(n, device=position.device) - position.unsqueeze(-1)) % n  # [b, n]

        def in_slots(x: Tensor) -> Tensor:
            """Return a window by slots. x: [b, h, L, d] -> [r, n, d]."""
            rows = torch.arange(len(x), device=x.device).unsqueeze(-1)
            padded = F.pad(x.transpose(1, 2), (0, 0, 0, 0, 1, 0))  # [b, n, h, d]
            return padded[rows, columns].transpose(1, 2).flatten(0, 1)

        is_filled = columns > window_len - position.unsqueeze(-1)
        in_window = is_filled.to(exact).repeat_interleave(n_head, 0).repeat(len(states), 1)
        values = [in_slots(state.v).to(dtype) for state in states]
        count, mean, n_tokens = None, None, in_window
        caches = [state.cache for state in states if state.cache is not None]
        if caches:
            count = torch.cat([x.count.flatten(0, 1) for x in caches])
            n_tokens = torch.cat([in_window, count.to(exact)], dim=-1)
            means = [x.mean.flatten(0, 1) for x in caches]
            pairs = zip(values, means, strict=True)
            values = [torch.cat([x, y.to(dtype)], dim=-2) for x, y in pairs]
            if exact != dtype:
                mean = tuple(x.clone() for x in means)
        keys = None
        if not are_codewords(states, codebooks):
            keys = tuple(in_slots(state.k) for state in states)
        return cls(
            values=tuple(values),
            z=tuple(in_slots(state.z.unsqueeze(-1)).squeeze(-1) for state in states),
            log_count=n_tokens.log(),
            position=position,
            n_pending=torch.zeros_like(position),
            count=count,
            mean=mean,
            k=keys,
        )

    @property
    def n_slots(self) -> int:
        return self.z[0].shape[-1]

    @property
    def slot(self) -> Tensor:
        """The free slot for the next token: [r, 1]."""
        n_head = len(self.z[0]) // len(self.position)
        return (self.position % self.n_slots).repeat_interleave(n_head).unsqueeze(-1)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors; they stay at their addresses."""
        for part in (getattr(self, f.name) for f in fields(self)):
            if part is not None:
                yield from (part,) if isinstance(part, Tensor) else part

    def write_row_(self, row: int, states: Sequence[VQState], codebooks: Sequence[Tensor]) -> None:
        """Replace one row by states of one row."""
        new = DecodeState.of(states, codebooks, self.values[0].dtype)
        if (new.k is None) != (self.k is None):
            raise ValueError("the keys in the window are codewords in some rows only")
        n_head = len(new.z[0])
        rows = slice(row * n_head, (row + 1) * n_head)
        for name in ("values", "z", "mean", "k"):
            pairs = zip(getattr(self, name) or (), getattr(new, name) or (), strict=True)
            for old_part, new_part in pairs:
                old_part[rows] = new_part
        for name in ("log_count", "count"):
            if getattr(self, name) is not None:
                by_layer = (len(states), -1)
                old_part = getattr(self, name).unflatten(0, by_layer)
                old_part[:, rows] = getattr(new, name).unflatten(0, by_layer)
        self.position[row] = new.position[0]
        self.n_pending[row] = 0

    def states(self, codebooks: Sequence[Tensor], dtype: torch.dtype) -> tuple[VQState, ...]:
        """Return a copy as attention states with this dtype."""
        rows = torch.arange(len(self.z[0]), device=self.position.device).unsqueeze(-1)
        steps = torch.arange(1, self.n_slots, device=self.position.device)
        order = rows, (self.slot + steps) % self.n_slots  # from the oldest token to the newest
        heads, found = (len(self.position), -1), []
        evicted = None if self.count is None else self.evict()
        for i, codebook in enumerate(codebooks):
            z = self.z[i][order].unflatten(0, heads)
            v = self.values[i][order].unflatten(0, heads).to(dtype)
            k = lookup(codebook.to(dtype), z)
            if self.k is not None:
                k = self.k[i][order].unflatten(0, heads).to(dtype)
            state = VQState(k, v, self.position.clone(), z)
            k = k.masked_fill(~state.window_valid[:, None, :, None], 0)
            cache = None
            if evicted is not None and self.count is not None:
                mean, count = self._means(i).clone(), self.count.chunk(len(self.z))[i].clone()
                codes, merged = evicted
                mean[rows, codes[i]] = merged.mean[i]
                count[rows, codes[i]] = merged.count[i]
                cache = CacheStats(mean.unflatten(0, heads), count.unflatten(0, heads))
            found.append(replace(state, k=k, cache=cache))
        return tuple(found)

    def _means(self, layer: int) -> Tensor:
        return self.values[layer][:, self.n_slots :] if self.mean is None else self.mean[layer]

    def evict(self) -> tuple[Tensor, CacheStats]:
        """Merge the token in the free slot of every row, if any, with the mean of its code.

        Return the codes, [n, r, 1], and their statistics with the evicted tokens.
        """
        assert self.count is not None
        n_layer, n_row = len(self.z), len(self.z[0])
        slot = self.slot
        z = torch.stack([x.gather(1, slot) for x in self.z])  # [n, r, 1]
        rows = torch.arange(n_row, device=slot.device).unsqueeze(-1)
        v = torch.stack([x[rows, slot] for x in self.values])  # [n, r, 1, v]
        place = z.unsqueeze(-1).expand(v.shape)
        mean = torch.stack([self._means(i).gather(1, place[i]) for i in range(n_layer)])
        count = self.count.gather(1, z.flatten(0, 1)).unflatten(0, (n_layer, n_row))
        pending = self.n_pending.repeat_interleave(n_row // len(self.n_pending))
        token = CacheStats(v.to(mean.dtype), pending.unsqueeze(-1).expand_as(count))
        return z, merge(CacheStats(mean, count), token)


@dataclass(frozen=True)
class Step:
    """What all layers share in one step.

    state: that of all layers. slot: [r, 1], that of the token. column: [r, 1, L + 1], the column of
    the positional scores for each slot. log_count: [n, r, columns]. rows: [r, 1], all rows.
    evicted: `DecodeState.evict`, or None without a cache.
    """

    state: DecodeState
    slot: Tensor
    column: Tensor
    log_count: Tensor
    rows: Tensor
    evicted: tuple[Tensor, CacheStats] | None

    @classmethod
    def start_(cls, state: DecodeState) -> Step:
        """Count the new token and the evicted ones; layers write them in `attend_one_`."""
        n, slot, device = state.n_slots, state.slot, state.position.device
        all_rows = torch.arange(len(state.log_count), device=device).unsqueeze(-1)
        evicted = None
        column = slot.repeat(len(state.z), 1)
        log = torch.zeros((), dtype=state.log_count.dtype, device=device).expand(all_rows.shape)
        if state.count is not None:
            evicted = state.evict()
            z, count = evicted[0].flatten(0, 1), evicted[1].count.flatten(0, 1)
            state.count.index_put_((all_rows, z), count)
            column = torch.cat([column, n + z], dim=1)
            log = torch.cat([log, count.to(log.dtype).log()], dim=1)
        state.log_count.index_put_((all_rows, column), log)
        state.position.add_(1)
        state.n_pending.copy_(state.position >= n)
        steps = torch.arange(n - 1, 2 * n - 1, device=device)
        n_row = len(state.z[0])
        return cls(
            state=state,
            slot=slot,
            # Column j of the positional scores is for distance L - j.
            column=((steps - slot) % n).unsqueeze(1),
            log_count=state.log_count.unflatten(0, (-1, n_row)),
            rows=all_rows[:n_row],
            evicted=evicted,
        )


@dataclass(frozen=True)
class Token:
    """One token per row in one layer. code_scores: [b, h, g, S] of the query with the codewords,
    position_scores: [b, h, g, L + 1] for distances L, ..., 0, or None; z: [b, h], v: [b, h, v].

    q: [b, h, g, k] and k_hat: [b, h, k], needed only if keys in the window are not codewords.
    """

    code_scores: Tensor
    position_scores: Tensor | None
    z: Tensor
    v: Tensor
    q: Tensor | None = None
    k_hat: Tensor | None = None


def attend_one_(token: Token, layer: int, step: Step) -> Tensor:
    """Attend from one token per row to itself, the window and the cache: [b, h, g, v].

    The token is written to the window of the layer, and the evicted one to its cache.
    """
    state, values = step.state, step.state.values[layer]
    z = state.z[layer].scatter_(1, step.slot, token.z.view(-1, 1))
    written, column = token.v.flatten(0, 1).unsqueeze(1).to(values.dtype), step.slot
    if step.evicted is not None:
        evicted, mean = step.evicted[0][layer], step.evicted[1].mean[layer]
        if state.mean is not None:
            state.mean[layer].index_put_((step.rows, evicted), mean)
        column = torch.cat([step.slot, state.n_slots + evicted], dim=1)
        written = torch.cat([written, mean.to(values.dtype)], dim=1)
    values.index_put_((step.rows, column), written)
    of_codes = token.code_scores.flatten(0, 1)  # [r, g, S]
    if state.k is None:
        window = of_codes.gather(-1, z.unsqueeze(1).expand(-1, of_codes.shape[1], -1))
    else:
        assert token.q is not None
        assert token.k_hat is not None
        k_hat = token.k_hat.flatten(0, 1).unsqueeze(1)
        keys = state.k[layer]
        keys.index_put_((step.rows, step.slot), k_hat.to(keys.dtype))
        window = token.q.flatten(0, 1) @ keys.mT.to(token.q.dtype)
    if token.position_scores is not None:
        by_distance = token.position_scores.flatten(0, 1)
        window = window + by_distance.gather(-1, step.column.expand(by_distance.shape))
    scores = window if step.evicted is None else torch.cat([window, of_codes], dim=-1)
    weights = (scores + step.log_count[layer].unsqueeze(1)).softmax(-1).to(values.dtype)
    # Not bmm: for a single query torch.compile would replace it by a slow loop on the CPU.
    output = torch.baddbmm(weights.new_empty(1, 1, 1), weights, values, beta=0)
    return output.view(*token.code_scores.shape[:-1], -1)


def are_codewords(states: Sequence[VQState], codebooks: Sequence[Tensor]) -> bool:
    """Return whether all keys in the windows are known to be codewords.

    They are, unless a codebook has changed since.
    """
    if not is_readable(states[0].k):  # looking would stall a GPU
        return False
    differ = [
        (state.k != lookup(codebook.to(state.k.dtype), state.z))
        & state.window_valid[:, None, :, None]
        for state, codebook in zip(states, codebooks, strict=True)
    ]
    return not torch.stack([x.any() for x in differ]).any()
