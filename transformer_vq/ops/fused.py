"""Attention in blocks as one function with a gradient of its own: what `reduction="auto"` runs.

The same mathematics as in `blockwise`, written for speed. Blocks are worked on in turn, some rows
of queries at a time, so that their scores stay near the processor; products are written to where
they are needed; the future half of a block is left out; the blocks that leave the window are merged
into running means per code. For the gradient the weights are kept, and nothing else of their size.

With c_n tokens per code before block n and their means M_n = sum_n / c_n, the gradient of the sum
is U_n = U_{n+1} + dM_n / c_n from the last block to the first, and a token that leaves with block
n gets that of its code, U_{n+1}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_vq.ops.cache import CacheStats, accumulation_dtype, block_stats, merge
from transformer_vq.ops.precision import full_precision
from transformer_vq.ops.ragged import Eviction, Visibility
from transformer_vq.ops.state import AttentionState
from transformer_vq.ops.tiles import Blocks, product, tile_weights, tiles


def attend_blocks(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    by_distance: Tensor,
    codebook: Tensor,
    state: AttentionState,
    leaving: Eviction | None,
    sight: Visibility | None,
    grad_through_cache: bool,
) -> tuple[Tensor, CacheStats | None]:
    """Output for whole blocks, or for one that is shorter than L, and the cache after them.

    Shapes as in `vq_attention`; `leaving` and `sight` say what padding and documents change.
    """
    b, h, _, seq_len, _ = q.shape
    window_len = state.k.shape[-2]
    n_blocks = max(1, seq_len // window_len)
    by_block = (n_blocks, seq_len // n_blocks)
    assert state.z is not None

    def per_head(x: Tensor) -> Tensor:
        """[b, ...] -> [b * h, ...]"""
        return x.repeat_interleave(h, dim=0)

    mean, count = None, q.new_zeros(b * h, 0, dtype=torch.int64)
    counted = torch.cat([state.window_valid, state.window_valid.new_ones(b, seq_len)], dim=-1)
    counted = counted[:, :seq_len].unflatten(-1, by_block)
    if state.cache is not None:
        mean, count = (x.flatten(0, 1) for x in (state.cache.mean, state.cache.count))
        codebook = codebook.to(v.dtype).expand(b, *codebook.shape).flatten(0, 1)
    codes = torch.cat([state.z, z], dim=-1)[..., :seq_len].flatten(0, 1)
    blocks = Blocks(
        n_blocks=n_blocks,
        n_empty=2 if _is_known_empty(state) else 0,
        grad_through_cache=grad_through_cache and mean is not None,
        keep=torch.is_grad_enabled(),
        codebook=codebook,
        count=count,
        codes=codes.unflatten(-1, by_block),
        window_valid=per_head(state.window_valid),
        counted=per_head(counted if leaving is None else leaving.counted),
        carry=None if leaving is None else per_head(leaving.carry).to(torch.int64),
        hidden_local=None if sight is None else per_head(~sight.local),
        hidden_cache=None if sight is None else per_head(~sight.cache),
    )
    output, mean_after, count_after = _Attention.apply(
        q.to(v.dtype).flatten(0, 1),
        k_hat.to(v.dtype).flatten(0, 1),
        v.flatten(0, 1),
        by_distance.flatten(0, 1),
        state.k.to(v.dtype).flatten(0, 1),
        state.v.to(v.dtype).flatten(0, 1),
        mean,
        blocks,
    )
    output = output.unflatten(0, (b, h))
    if state.cache is None:
        return output, None
    after = CacheStats(mean_after.unflatten(0, (b, h)), count_after.unflatten(0, (b, h)))
    if leaving is not None:
        after = CacheStats(after.mean, after.count * leaving.goes_on.view(-1, 1, 1))
    return output, after


class _Attention(torch.autograd.Function):
    """q: [B, g, t, k], k: [B, t, k], v: [B, t, v], by_distance: [B, g, t, L + 1], k_window:
    [B, L, k], v_window: [B, L, v], mean: [B, s, v] -> [B, g, t, v], mean and count afterwards."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        by_distance: Tensor,
        k_window: Tensor,
        v_window: Tensor,
        mean: Tensor | None,
        blocks: Blocks,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.blocks = blocks
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        cache = None if mean is None else CacheStats(mean, blocks.count)
        count = blocks.count
        weights: list[Tensor] = []
        means: list[Tensor] = []
        counts = [count]
        with full_precision(q.device):
            for n in range(blocks.n_blocks):
                k_local, v_local = _local(k_window, k, n), _local(v_window, v, n)
                n_code, first = blocks.n_code(n), blocks.first_key(n, k_window.shape[1])
                if cache is not None and n_code > 0:
                    means.append(cache.mean.to(v.dtype))
                for tile in tiles(q, k_window, n):
                    w = tile_weights(tile, q, k_local, by_distance, count, blocks).to(v.dtype)
                    o = out[:, :, tile.queries].flatten(1, 2)  # of one group: the place itself
                    product(w[..., n_code + first :], v_local[:, first : tile.n_local], out=o)
                    if n_code > 0:
                        o.baddbmm_(w[..., :n_code], means[-1])
                    if tile.n_group > 1:
                        out[:, :, tile.queries] = o.unflatten(1, (tile.n_group, -1))
                    if blocks.keep:
                        weights.append(w)
                if cache is not None:
                    cache = merge(cache, _leaving(v_window, v, blocks, n))
                    count = cache.count
                    counts.append(count)
        if blocks.keep:
            ctx.counts, ctx.n_tiles = counts, len(weights)
            ctx.save_for_backward(q, k, v, k_window, v_window, *weights, *means)
        ctx.mark_non_differentiable(count)
        ctx.by_distance_shape = by_distance.shape
        return out, None if cache is None else cache.mean, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor, d_mean: Tensor | None, d_count: None
    ) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        q, k, v, k_window, v_window, *rest = ctx.saved_tensors
        weights, means = rest[: ctx.n_tiles], rest[ctx.n_tiles :]
        window_len, exact = k_window.shape[1], accumulation_dtype(v.dtype)
        d_q = torch.empty_like(q)
        d_by_distance = q.new_empty(ctx.by_distance_shape)
        # Of the window and then the segment: a block's gradient is a stretch of it.
        d_k = k.new_zeros(k.shape[0], window_len + k.shape[1], k.shape[2], dtype=exact)
        d_v = v.new_empty(v.shape[0], window_len + v.shape[1], v.shape[2], dtype=exact)
        d_v[:, blocks.n_blocks * window_len :] = 0  # the rest as tokens leave
        u = None
        if blocks.grad_through_cache:
            u = v.new_zeros(*blocks.count.shape, v.shape[-1], dtype=exact)
            if d_mean is not None:
                u += d_mean * _per_token(ctx.counts[-1], exact)
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
                    d_leaving = d_window[:, : blocks.codes.shape[-1]]
                    d_leaving.copy_(u.flatten(0, 1)[blocks.rows(n)])
                    if blocks.some_left_out(n):
                        d_leaving *= blocks.counted[:, n].unsqueeze(-1)
                    if blocks.carry is not None:
                        u *= blocks.carry[:, n].view(-1, 1, 1)
                    d_cached = torch.zeros_like(u) if n_code > 0 else None
                for tile in reversed(tiles(q, k_window, n)):
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
                    d_s = _softmax_backward(d_s.to(exact), w.to(exact)).to(q.dtype)
                    d_local = d_s[..., n_code + first :]
                    _add_product_(d_k[:, into], d_local.mT, q_tile)
                    d_q_tile = product(d_local, k_local[:, keys])
                    if cached is not None:
                        d_q_tile.baddbmm_(d_s[..., :n_code], blocks.codebook)
                    d_q[:, :, tile.queries] = d_q_tile.view_as(d_q[:, :, tile.queries])
                    d_by_distance[:, :, tile.queries] = tile.by_distance(d_s, n_code)
                if u is not None and d_cached is not None:
                    u.addcmul_(d_cached, _per_token(ctx.counts[n], exact))
        d_k, d_v = d_k.to(k.dtype), d_v.to(v.dtype)
        d_initial = None if u is None else u * blocks.count.to(exact).unsqueeze(-1)
        return (
            d_q,
            d_k[:, window_len:],
            d_v[:, window_len:],
            d_by_distance,
            d_k[:, :window_len],
            d_v[:, :window_len],
            d_initial,
            None,
        )


def _softmax_backward(d_weights: Tensor, weights: Tensor) -> Tensor:
    """Gradient of the scores from that of their softmax over the last axis, in one pass."""
    backward = torch.ops.aten._softmax_backward_data
    return backward(d_weights, weights, -1, weights.dtype)


def _local(window: Tensor, segment: Tensor, block: int) -> Tensor:
    """The tokens of the block before a block, and its own: [B, 2 L, ...]; copied for the first."""
    window_len = window.shape[1]
    if block == 0:
        return torch.cat([window, segment[:, :window_len]], dim=1)
    return segment[:, (block - 1) * window_len : (block + 1) * window_len]


def _leaving(v_window: Tensor, v: Tensor, blocks: Blocks, block: int) -> CacheStats:
    """Statistics of the tokens that are evicted from the window with a block."""
    n, window_len = blocks.codes.shape[-1], v_window.shape[1]
    start = (block - 1) * window_len
    values = v_window[:, :n] if block == 0 else v[:, start : start + n]
    counted = blocks.counted[:, block] if blocks.some_left_out(block) else None
    stats = block_stats(blocks.codes[:, block], values, blocks.count.shape[-1], counted)
    return stats if blocks.carry is None else replace(stats, carry=blocks.carry[:, block])


def _is_known_empty(state: AttentionState) -> bool:
    """Return whether window and cache of all rows are empty, where looking costs nothing.

    The values decide, so a state that was assembled by hand cannot be mistaken for an empty one.
    On a GPU looking would stall the host, and attending to empty slots gives the same result.
    """
    if state.position.device.type != "cpu":
        return False
    cached = state.cache is not None and bool(state.cache.count.any())
    return not cached and not state.position.any()


def _per_token(count: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the tokens of a code; anything for a code that has none. [B, s] -> [B, s, 1]."""
    return count.clamp(min=1).to(dtype).reciprocal().unsqueeze(-1)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, whatever the precision of the product."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += product(a, b)
