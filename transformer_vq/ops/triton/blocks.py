"""Launch the kernels for attention within blocks; shapes as in `kernels`, B = b * h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_vq.ops.triton.kernels import flash, weights
from transformer_vq.ops.triton.launch import Tiles, dot_constants, fit, launch, n_tiles, tiles_of
from transformer_vq.ops.triton.segment import Prefix, Segment


def _attention_arguments(
    segment: Segment,
    q: Tensor,
    k_prev: Tensor,
    k: Tensor,
    by_distance: Tensor | None,
    counts: Tensor,
) -> dict[str, Tensor | int]:
    return {
        "q": q,
        "k_prev": k_prev,
        "k": k,
        "by_distance": q if by_distance is None else by_distance,
        "code": segment.codebook,
        "count": counts,
        "start": segment.start,
        "n_blocks": segment.n_blocks,
        "n_query": segment.n_query,
        "n_group": q.shape[1],
        "n_head": segment.n_head,
        "start_row": segment.start.stride(0),
        "start_step": segment.start.stride(1),
    }


def _attention_constants(
    segment: Segment, q: Tensor, by_distance: Tensor | None, tiles: Tiles
) -> dict[str, Any]:
    d_k, n_code, window_len = q.shape[-1], segment.n_code, segment.window_len
    return {
        "L": window_len,
        "S": n_code,
        "DK": d_k,
        "D": fit(d_k, 2**16),
        "ROWS": fit(segment.n_query, tiles.rows),
        "COLUMNS": fit(max(n_code, window_len), tiles.columns),
        "HAS_BIAS": by_distance is not None,
        "HAS_DOCUMENTS": segment.has_documents,
        **dot_constants(q.dtype),
    }


def block_lse(
    segment: Segment,
    q: Tensor,
    k_prev: Tensor,
    k: Tensor,
    by_distance: Tensor | None,
    counts: Tensor,
) -> Tensor:
    """Return the log of the softmax's sum, [B, g, t] in float32.

    q: [B, g, t, k], k_prev: [B, r, L, k], k: [B, r, i, k], by_distance: [B, g, t, L + 1].
    """
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32)
    tiles = tiles_of("block_lse", q.dtype)
    rows = fit(segment.n_query, tiles.rows)
    launch(
        weights.block_lse,
        (n_tiles(segment.n_query, rows), segment.n_blocks, q.shape[0] * q.shape[1]),
        {**_attention_arguments(segment, q, k_prev, k, by_distance, counts), "lse": lse},
        _attention_constants(segment, q, by_distance, tiles),
        tiles,
    )
    return lse


def block_weights(
    segment: Segment,
    q: Tensor,
    k_prev: Tensor,
    k: Tensor,
    by_distance: Tensor | None,
    counts: Tensor,
    lse: Tensor,
) -> Tensor:
    """Return the weights, [B * r, g * i, s + L + i]; arguments as for `block_lse`."""
    n_rows, n_group = q.shape[:2]
    shape = (n_rows * segment.n_blocks, n_group * segment.n_query)
    w = q.new_empty(*shape, segment.n_code + segment.window_len + segment.n_query)
    tiles = tiles_of("block_weights", q.dtype)
    rows = fit(segment.n_query, tiles.rows)
    launch(
        weights.block_weights,
        (n_tiles(segment.n_query, rows), segment.n_blocks, n_rows * n_group),
        {
            **_attention_arguments(segment, q, k_prev, k, by_distance, counts),
            "weights": w,
            "lse": lse,
        },
        _attention_constants(segment, q, by_distance, tiles),
        tiles,
    )
    return w


def softmax_backward_(
    segment: Segment, w: Tensor, d_w: Tensor, n_group: int, by_distance: Tensor | None
) -> Tensor | None:
    """Replace the gradient of the weights by that of the scores; return that of by_distance."""
    d_by_distance = None if by_distance is None else torch.empty_like(by_distance)
    tiles = tiles_of("softmax_backward", w.dtype)
    rows = fit(segment.n_query, tiles.rows)
    launch(
        weights.softmax_backward,
        (
            n_tiles(segment.n_query, rows),
            segment.n_blocks,
            w.shape[0] // segment.n_blocks * n_group,
        ),
        {
            "weights": w,
            "d_weights": d_w,
            "d_by_distance": w if d_by_distance is None else d_by_distance,
            "n_blocks": segment.n_blocks,
            "n_query": segment.n_query,
            "n_group": n_group,
        },
        {
            "L": segment.window_len,
            "S": segment.n_code,
            "ROWS": rows,
            "COLUMNS": fit(w.shape[-1], tiles.columns),
            "HAS_BIAS": by_distance is not None,
        },
        tiles,
    )
    return d_by_distance


def flash_blocks(
    segment: Segment,
    q: Tensor,
    k_prev: Tensor,
    k: Tensor,
    v_prev: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    before: Prefix | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, [B, g, t, v], and the log of the softmax's sum, in one kernel."""
    n_rows, n_group, seq_len, _ = q.shape
    d_v = v.shape[-1]
    out = v.new_empty(n_rows, n_group, seq_len, d_v)
    lse = q.new_empty(n_rows, n_group, seq_len, dtype=torch.float32)
    tiles = tiles_of("flash_blocks", q.dtype)
    rows = fit(segment.n_query, tiles.rows)
    counts = segment.count if before is None else before.counts
    launch(
        flash.flash_blocks,
        (n_tiles(segment.n_query, rows), segment.n_blocks, n_rows * n_group),
        {
            **_attention_arguments(segment, q, k_prev, k, by_distance, counts),
            "v_prev": v_prev,
            "v": v,
            "mean": v if before is None else before.means,
            "out": out,
            "lse": lse,
        },
        {
            **_attention_constants(segment, q, by_distance, tiles),
            "DV": d_v,
            "V": fit(d_v, 2**16),
        },
        tiles,
    )
    return out, lse
