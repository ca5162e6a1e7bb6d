"""Launch the kernels for the cache before each block; shapes as in `kernels`, B = b * h."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_vq.ops.triton.kernels import cache
from transformer_vq.ops.triton.launch import dot_constants, fit, launch, n_tiles, tiles_of
from transformer_vq.ops.triton.segment import Prefix, Segment


def prefix(segment: Segment, v_prev: Tensor, mean: Tensor) -> Prefix:
    """Return the cache before each block. v_prev: [B, r, L, v], mean: [B, s, v]."""
    n_rows, n_code, d_v = mean.shape
    means = v_prev.new_empty(n_rows, segment.n_blocks, n_code, d_v)
    counts = segment.count.new_empty(n_rows, segment.n_blocks + 1, n_code)
    after = torch.empty_like(mean)
    tiles = tiles_of("cache_prefix", v_prev.dtype)
    rows, values = fit(n_code, tiles.rows), fit(d_v, tiles.values)
    launch(
        cache.cache_prefix,
        (n_tiles(d_v, values), n_tiles(n_code, rows), n_rows),
        {
            "z": segment.codes,
            "v": v_prev,
            "counted": segment.counted,
            "carry": segment.codes if segment.carry is None else segment.carry,
            "mean": mean,
            "count": segment.count,
            "means": means,
            "counts": counts,
            "mean_after": after,
            "n_blocks": segment.n_blocks,
            "n_query": segment.n_query,
            "n_head": segment.n_head,
            "d_v": d_v,
        },
        {
            "L": segment.window_len,
            "S": n_code,
            "ROWS": rows,
            "COLUMNS": fit(segment.n_query, tiles.columns),
            "VALUES": values,
            "HAS_CARRY": segment.carry is not None,
            **dot_constants(v_prev.dtype, exact=True),
        },
        tiles,
    )
    return Prefix(means, counts, after)


def prefix_gradient(
    segment: Segment,
    d_means: Tensor,
    counts: Tensor,
    d_after: Tensor | None,
    d_v_prev: Tensor,
) -> Tensor:
    """Add the gradient of evicted values to d_v_prev; return that of the mean before the segment.

    d_means: [B, r, s, v], d_after: [B, s, v] -> [B, s, v].
    """
    n_rows, n_blocks, n_code, d_v = d_means.shape
    sums = torch.empty_like(d_means, dtype=torch.float32)
    d_mean = sums.new_empty(n_rows, n_code, d_v)
    tiles = tiles_of("cache_suffix", d_means.dtype)
    rows, values = fit(n_code, tiles.rows), fit(d_v, tiles.values)
    launch(
        cache.cache_suffix,
        (n_tiles(d_v, values), n_tiles(n_code, rows), n_rows),
        {
            "d_means": d_means,
            "counts": counts,
            "carry": counts if segment.carry is None else segment.carry,
            "d_after": d_means if d_after is None else d_after.contiguous(),
            "sums": sums,
            "d_mean": d_mean,
            "n_blocks": n_blocks,
            "n_head": segment.n_head,
            "d_v": d_v,
        },
        {
            "S": n_code,
            "ROWS": rows,
            "VALUES": values,
            "HAS_CARRY": segment.carry is not None,
            "HAS_AFTER": d_after is not None,
        },
        tiles,
    )
    tiles = tiles_of("evicted_gradient", d_v_prev.dtype)
    rows, values = fit(segment.n_query, tiles.rows), fit(d_v, tiles.values)
    launch(
        cache.evicted_gradient,
        (n_tiles(d_v, values), n_tiles(segment.n_query, rows), n_rows * n_blocks),
        {
            "sums": sums,
            "z": segment.codes,
            "counted": segment.counted,
            "d_v_prev": d_v_prev,
            "n_blocks": n_blocks,
            "n_query": segment.n_query,
            "n_head": segment.n_head,
            "d_v": d_v,
        },
        {"L": segment.window_len, "S": n_code, "ROWS": rows, "VALUES": values},
        tiles,
    )
    return d_mean
