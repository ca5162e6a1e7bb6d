"""Blockwise attention as one autograd function: eager `reduction="auto"`.

The mathematics is that of `blockwise`, written for speed. Blocks are processed in order, a tile of
queries at a time, so that on CPUs scores stay in caches. Products are written in place, the
causal half of a block is skipped, and evicted blocks are merged into running means per code. Only
the weights are kept for the backward pass, and nothing else of their size.

Let c_n be the tokens per code before block n, and M_n = sum_n / c_n their means. The gradient of
the sum is U_n = U_{n+1} + dM_n / c_n, from the last block to the first. A token evicted with block
n gets the gradient of its code, U_{n+1}.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_vq.ops.cache import CacheStats, accumulation_dtype, block_stats, merge
from transformer_vq.ops.packing import AttentionInputs, Eviction
from transformer_vq.ops.runtime import full_precision
from transformer_vq.ops.state import VQState

SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data  # in one pass


@dataclass(frozen=True)
class Blocks:
    """Everything that has no gradient. B is b * h, n counts blocks, i the queries of a block.

    codebook: [B, s, k], count: [B, s] (s = 0 without a cache), codes: [B, n, i] of the tokens
    evicted with a block, counted: [B, n, i] False for those that do not count, window_valid:
    [B, L]. For documents also carry: [B, n], 0 where the cache starts over, and doc_start: [b, t],
    as in `Packing`. Masks are derived from it tile by tile: kept, they would be far larger.
    """

    n_blocks: int
    n_empty: int
    """Number of first blocks with an empty cache; the first of them also has an empty window."""
    grad_through_cache: bool
    keep: bool
    tile_queries: int | None  # queries per tile; None for a whole block
    codebook: Tensor
    count: Tensor
    codes: Tensor
    window_valid: Tensor
    counted: Tensor
    carry: Tensor | None
    doc_start: Tensor | None

    def n_code(self, block: int) -> int:
        """Return the number of score columns for the cache."""
        return 0 if block < self.n_empty else self.count.shape[-1]

    def first_key(self, block: int, window_len: int) -> int:
        """Return the index of the first visible key in the previous block and the block itself."""
        return window_len if block == 0 and self.n_empty > 0 else 0

    def rows(self, block: int) -> Tensor:
        """Return the rows in the flattened cache, [B * s, ...], of the evicted tokens: [B, i]."""
        n_heads, n_code = self.count.shape
        first = n_code * torch.arange(n_heads, device=self.codes.device).unsqueeze(-1)
        return self.codes[:, block] + first

    def has_uncounted(self, block: int) -> bool:
        """Return whether evicted tokens may not count: empty slots, other documents."""
        return block == 0 or self.carry is not None


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of a block, which attend to n_local keys of the window and the block."""

    block: int
    first: int  # index of the first query in its block
    queries: slice  # indices of the queries in the segment
    n_group: int
    window_len: int

    @property
    def n_rows(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def n_local(self) -> int:
        return self.window_len + self.first + self.n_rows

    def by_distance(self, scores: Tensor, n_code: int) -> Tensor:
        """Return a view of the scores by distance L, ..., 0: [B, g, rows, L + 1].

        Query i of a block is at distance L from key i of the window and the block, so each row
        starts one key later than the previous one.
        """
        n_keys = scores.shape[-1]
        return scores.as_strided(
            (scores.shape[0], self.n_group, self.n_rows, self.window_len + 1),
            (scores.stride(0), self.n_rows * n_keys, n_keys + 1, 1),
            scores.storage_offset() + n_code + self.first,
        )


def tiles(q: Tensor, window: Tensor, block: int, n_queries: int | None) -> list[Tile]:
    """Return the tiles of a block, of n_queries each; None for a single tile."""
    _, n_group, seq_len, _ = q.shape
    window_len = window.shape[1]
    start, stop = block * window_len, min((block + 1) * window_len, seq_len)
    rows = window_len if n_queries is None else n_queries
    return [
        Tile(block, i - start, slice(i, min(i + rows, stop)), n_group, window_len)
        for i in range(start, stop, rows)
    ]


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b: [B, i, j] and [B, j, k] -> [B, i, k].

    A batch of one is a matrix product: in bf16 on a CPU, `bmm` copies transposed operands.
    """
    if a.shape[0] > 1:
        return torch.bmm(a, b, out=out)
    return torch.mm(a[0], b[0], out=None if out is None else out[0]).unsqueeze(0)


def tile_scores(
    tile: Tile, q: Tensor, k_local: Tensor, bias: Tensor | None, count: Tensor, blocks: Blocks
) -> Tensor:
    """Return scores of cache, window and block, up to the last query's own key.

    [B, g * rows, keys], -inf for keys that a query must not attend to.
    """
    n_code, window_len = blocks.n_code(tile.block), tile.window_len
    q = q[:, :, tile.queries].flatten(1, 2)
    scores = q.new_empty(*q.shape[:2], n_code + tile.n_local)
    first_key = blocks.first_key(tile.block, window_len)
    # Columns before first_key stay uninitialized; they are masked below.
    local = scores[..., n_code + first_key :]
    product(q, k_local[:, first_key : tile.n_local].mT, out=local)
    if n_code > 0:
        product(q, blocks.codebook.mT, out=scores[..., :n_code])
    scores = scores.to(accumulation_dtype(scores.dtype))
    if bias is not None:
        tile.by_distance(scores, n_code).add_(bias[:, :, tile.queries])

    by_query = scores.view(q.shape[0], tile.n_group, tile.n_rows, -1)
    future = torch.ones(tile.n_rows, tile.n_rows, dtype=torch.bool, device=q.device).triu(1)
    by_query[..., -tile.n_rows :].masked_fill_(future, -torch.inf)
    if n_code > 0:
        log_count = count.clamp(min=1).to(scores.dtype).log()
        scores[..., :n_code] += torch.where(count > 0, log_count, -torch.inf).unsqueeze(1)
    if count.shape[-1] == 0:  # without a cache, attention ends at distance L
        far = torch.ones(tile.n_rows, window_len, dtype=torch.bool, device=q.device)
        by_query[..., :window_len].masked_fill_(far.tril(tile.first - 1), -torch.inf)
    if tile.block == 0:
        empty = ~blocks.window_valid[:, None, None]
        by_query[..., n_code : n_code + window_len].masked_fill_(empty, -torch.inf)
    if blocks.doc_start is not None:
        by_row = by_query.unflatten(0, (len(blocks.doc_start), -1))  # [b, h, g, rows, keys]
        start = blocks.doc_start[:, None, None, tile.queries, None]
        first = tile.block * window_len - window_len
        keys = first + torch.arange(tile.n_local, device=q.device)
        by_row[..., n_code:].masked_fill_(keys < start, -torch.inf)
        by_row[..., :n_code].masked_fill_(first <= start, -torch.inf)
    return scores


def attend_blocks(
    inputs: AttentionInputs,
    state: VQState,
    evicted: Eviction,
    grad_through_cache: bool,
    tile_queries: int | None = None,
) -> tuple[Tensor, CacheStats | None]:
    """Attend from whole blocks, or from one shorter block; also return the cache after them."""
    b, h, _, seq_len, _ = inputs.q.shape
    n_blocks = max(1, seq_len // state.k.shape[-2])

    def per_head(x: Tensor) -> Tensor:
        """[b, ...] -> [b * h, ...]"""
        return x.repeat_interleave(h, dim=0)

    count, codebook = inputs.z.new_zeros(b * h, 0), inputs.codebook
    if state.cache is not None:
        count = state.cache.count.flatten(0, 1)
        codebook = codebook.to(inputs.v.dtype).expand(b, *codebook.shape).flatten(0, 1)
    codes = torch.cat([state.z, inputs.z], dim=-1)[..., :seq_len].flatten(0, 1)
    blocks = Blocks(
        n_blocks=n_blocks,
        n_empty=2 if _is_known_empty(state) else 0,
        grad_through_cache=grad_through_cache and state.cache is not None,
        keep=torch.is_grad_enabled(),
        tile_queries=tile_queries,
        codebook=codebook,
        count=count,
        codes=codes.unflatten(-1, (n_blocks, -1)),
        window_valid=per_head(state.window_valid),
        counted=per_head(evicted.counted),
        carry=None if evicted.carry is None else per_head(evicted.carry),
        doc_start=None if inputs.packing is None else inputs.packing.doc_start,
    )
    return apply_by_head(_Attention, inputs, state, blocks)


def apply_by_head(
    function: Any, inputs: AttentionInputs, state: VQState, constants: object
) -> tuple[Tensor, CacheStats | None]:
    """Apply an autograd function with rows and heads as one axis, B = b * h."""
    heads, dtype, by_distance = inputs.z.shape[:2], inputs.v.dtype, inputs.by_distance
    output, mean, count = function.apply(
        inputs.q.to(dtype).flatten(0, 1),
        inputs.k_hat.to(dtype).flatten(0, 1),
        inputs.v.flatten(0, 1),
        None if by_distance is None else by_distance.flatten(0, 1),
        state.k.to(dtype).flatten(0, 1),
        state.v.to(dtype).flatten(0, 1),
        None if state.cache is None else state.cache.mean.flatten(0, 1),
        constants,
    )
    output = output.unflatten(0, heads)
    if mean is None:
        return output, None
    return output, CacheStats(mean.unflatten(0, heads), count.unflatten(0, heads))


class _Attention(torch.autograd.Function):
    """q: [B, g, t, k], k: [B, t, k], v: [B, t, v], by_distance: [B, g, t, L + 1], k_window:
    [B, L, k], v_window: [B, L, v], mean: [B, s, v] -> [B, g, t, v], mean and count after, where
    B = b * h."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        by_distance: Tensor | None,
        k_window: Tensor,
        v_window: Tensor,
        mean: Tensor | None,
        blocks: Blocks,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        out, count = v.new_empty(*q.shape[:3], v.shape[-1]), blocks.count
        cache = None if mean is None else CacheStats(mean, count)
        weights, means, counts = list[Tensor](), list[Tensor](), [count]
        with full_precision(q.device):
            for n in range(blocks.n_blocks):
                k_local, v_local = _local(k_window, k, n), _local(v_window, v, n)
                n_code, first = blocks.n_code(n), blocks.first_key(n, k_window.shape[1])
                if cache is not None and n_code > 0:
                    means.append(cache.mean.to(v.dtype))
                for tile in tiles(q, k_window, n, blocks.tile_queries):
                    scores = tile_scores(tile, q, k_local, by_distance, count, blocks)
                    w = scores.softmax(dim=-1).to(v.dtype)
                    # With one group a view: the product is written in place.
                    o = out[:, :, tile.queries].flatten(1, 2)
                    product(w[..., n_code + first :], v_local[:, first : tile.n_local], out=o)
                    if n_code > 0:
                        o.baddbmm_(w[..., :n_code], means[-1])
                    if tile.n_group > 1:
                        out[:, :, tile.queries] = o.unflatten(1, (tile.n_group, -1))
                    if blocks.keep:
                        weights.append(w)
                if cache is not None:
                    cache = merge(cache, _evicted(v_window, v, blocks, n))
                    count = cache.count
                    counts.append(count)
        if blocks.keep:
            # All tensors are saved, so that activation checkpointing frees them.
            constants = {name: x for name, x in vars(blocks).items() if isinstance(x, Tensor)}
            removed: dict[str, Any] = dict.fromkeys(constants)
            ctx.blocks, ctx.names = replace(blocks, **removed), list(constants)
            ctx.sizes = [len(weights), len(means), len(counts)]
            saved = [q, k, v, k_window, v_window, *weights, *means, *counts]
            ctx.save_for_backward(*saved, *constants.values())
        ctx.mark_non_differentiable(count)
        ctx.by_distance_shape = None if by_distance is None else by_distance.shape
        return out, None if cache is None else cache.mean, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor, d_mean: Tensor | None, d_count: None
    ) -> tuple[Tensor | None, ...]:
        # o = w v + w_c M with w = softmax(s), s = q k' + q c' + log count + bias. So dv = w' do,
        # dM = w_c' do, dw = do [v, M]', and ds = w (dw - sum(w dw)); then dq = ds [k, c],
        # dk = ds' q, and ds is the gradient of the bias. dM reaches evicted values through U.
        q, k, v, k_window, v_window, *rest = ctx.saved_tensors
        weights, means, counts = ([rest.pop(0) for _ in range(n)] for n in ctx.sizes)
        blocks = replace(ctx.blocks, **dict(zip(ctx.names, rest, strict=True)))
        window_len, exact = k_window.shape[1], accumulation_dtype(v.dtype)
        d_q = torch.empty_like(q)
        shape = ctx.by_distance_shape
        d_by_distance = None if shape is None else q.new_empty(shape)
        # Of the window and then the segment: the gradient of a block is a slice of it.
        d_k = k.new_zeros(k.shape[0], window_len + k.shape[1], k.shape[2], dtype=exact)
        d_v = v.new_empty(v.shape[0], window_len + v.shape[1], v.shape[2], dtype=exact)
        d_v[:, blocks.n_blocks * window_len :] = 0  # the rest is set as tokens are evicted
        u = None
        if blocks.grad_through_cache:
            u = v.new_zeros(*blocks.count.shape, v.shape[-1], dtype=exact)
            if d_mean is not None:
                u += d_mean * _per_token(counts[-1], exact)
        with full_precision(q.device):
            for n in reversed(range(blocks.n_blocks)):
                k_local, v_local = _local(k_window, k, n), _local(v_window, v, n)
                start, n_code = n * window_len, blocks.n_code(n)
                first = blocks.first_key(n, window_len)
                cached = means.pop() if n_code > 0 else None
                d_cached, d_window = None, d_v[:, start : start + window_len]
                if u is None or blocks.codes.shape[-1] < window_len:
                    d_window.zero_()
                if u is not None:
                    d_evicted = d_window[:, : blocks.codes.shape[-1]]
                    d_evicted.copy_(u.flatten(0, 1)[blocks.rows(n)])
                    if blocks.has_uncounted(n):
                        d_evicted *= blocks.counted[:, n].unsqueeze(-1)
                    if blocks.carry is not None:
                        u *= blocks.carry[:, n].view(-1, 1, 1)
                    d_cached = torch.zeros_like(u) if n_code > 0 else None
                for tile in reversed(tiles(q, k_window, n, blocks.tile_queries)):
                    w = weights.pop()
                    d_o = d_out[:, :, tile.queries].flatten(1, 2)
                    q_tile = q[:, :, tile.queries].flatten(1, 2)
                    keys = slice(first, tile.n_local)
                    into = slice(start + first, start + tile.n_local)
                    _add_product_(d_v[:, into], w[..., n_code + first :].mT, d_o)
                    if d_cached is not None:
                        _add_product_(d_cached, w[..., :n_code].mT, d_o)
                    d_s = torch.empty_like(w)
                    d_s[..., n_code : n_code + first] = 0
                    product(d_o, v_local[:, keys].mT, out=d_s[..., n_code + first :])
                    if cached is not None:
                        product(d_o, cached.mT, out=d_s[..., :n_code])
                    d_s = SOFTMAX_BACKWARD(d_s.to(exact), w.to(exact), -1, exact).to(q.dtype)
                    d_local = d_s[..., n_code + first :]
                    _add_product_(d_k[:, into], d_local.mT, q_tile)
                    d_q_tile = product(d_local, k_local[:, keys])
                    if cached is not None:
                        d_q_tile.baddbmm_(d_s[..., :n_code], blocks.codebook)
                    d_q[:, :, tile.queries] = d_q_tile.view_as(d_q[:, :, tile.queries])
                    if d_by_distance is not None:
                        d_by_distance[:, :, tile.queries] = tile.by_distance(d_s, n_code)
                if u is not None and d_cached is not None:
                    u.addcmul_(d_cached, _per_token(counts[n], exact))
        d_k_window, d_k = d_k.to(k.dtype).split([window_len, k.shape[1]], dim=1)
        d_v_window, d_v = d_v.to(v.dtype).split([window_len, v.shape[1]], dim=1)
        d_initial = None if u is None else u * blocks.count.to(exact).unsqueeze(-1)
        return d_q, d_k, d_v, d_by_distance, d_k_window, d_v_window, d_initial, None


def _local(window: Tensor, segment: Tensor, block: int) -> Tensor:
    """Return the previous block and the block itself: [B, 2 L, ...]; a copy for the first block."""
    window_len = window.shape[1]
    if block == 0:
        return torch.cat([window, segment[:, :window_len]], dim=1)
    return segment[:, (block - 1) * window_len : (block + 1) * window_len]


def _evicted(v_window: Tensor, v: Tensor, blocks: Blocks, block: int) -> CacheStats:
    """Return the statistics of the tokens evicted with a block."""
    n, window_len = blocks.codes.shape[-1], v_window.shape[1]
    start = (block - 1) * window_len
    values = v_window[:, :n] if block == 0 else v[:, start : start + n]
    counted = blocks.counted[:, block] if blocks.has_uncounted(block) else None
    stats = block_stats(blocks.codes[:, block], values, blocks.count.shape[-1], counted)
    return stats if blocks.carry is None else replace(stats, carry=blocks.carry[:, block])


def _is_known_empty(state: VQState) -> bool:
    """Return whether window and cache of all rows are empty, where checking is free.

    The values decide, so a state assembled by hand cannot be mistaken for an empty one. On a GPU
    checking would stall the host, and attending to empty slots gives the same result.
    """
    if state.position.device.type != "cpu":
        return False
    cached = state.cache is not None and bool(state.cache.count.any())
    return not cached and not state.position.any()


def _per_token(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / count; arbitrary for a count of 0. [B, s] -> [B, s, 1]."""
    return count.clamp(min=1).to(dtype).reciprocal().unsqueeze(-1)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b, where the product may have a lower precision."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += product(a, b)
