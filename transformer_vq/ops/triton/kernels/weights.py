"""Attention weights of blocks, and the gradient of their scores."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.scores import (
    block_keys,
    cache_scores,
    local_scores,
    online_sum,
    query_tile,
)


@triton.jit
def block_lse(
    q, k_prev, k, by_distance, code, count, start, lse,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Log of the softmax's sum over cache, previous block and own block: [B, G, T].

    `tiles.tile_scores(...).logsumexp(-1)`, with one maximum over all columns. One program per tile
    of queries.
    """
    tile, n, bg = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    bh = bg // n_group
    d = tl.arange(0, D)
    i, inside, row, q_tile, bias, first, sees_cache = query_tile(
        q, by_distance, start, tile, n, bg,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    k_prev, k, code, count = block_keys(
        k_prev, k, code, count, n, bh, n_blocks, n_query, n_head, L, S, DK
    )
    end = tl.minimum(tile * ROWS + ROWS, n_query)  # later keys are in the future

    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for j0 in range(0, S, COLUMNS):
        s = j0 + tl.arange(0, COLUMNS)
        scores = cache_scores(q_tile, code, count, s, d, sees_cache, S, DK, PRECISION, WIDEN)
        highest, total = online_sum(scores, highest, total)
    for j0 in range(0, L, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k_prev, j, L, j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        highest, total = online_sum(scores, highest, total)
    for j0 in range(0, end, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k, j, n_query, L + j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        highest, total = online_sum(scores, highest, total)
    tl.store(lse + row, highest + tl.log(total), mask=inside)


@triton.jit
def block_weights(
    q, k_prev, k, by_distance, code, count, start, weights, lse,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Softmax over cache, previous block and own block: `tiles.tile_scores(...).softmax(-1)`.

    Normalized by `block_lse`; a kernel that computes both spills registers. One program per tile of
    queries. weights: [B, n_blocks, G, n_query, S + L + n_query], zero where masked.
    """
    tile, n, bg = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    bh = bg // n_group
    d = tl.arange(0, D)
    i, inside, row, q_tile, bias, first, sees_cache = query_tile(
        q, by_distance, start, tile, n, bg,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    k_prev, k, code, count = block_keys(
        k_prev, k, code, count, n, bh, n_blocks, n_query, n_head, L, S, DK
    )
    norm = tl.load(lse + row, mask=inside, other=0.0)

    block, group = bh * n_blocks + n, bg % n_group
    weights += (((block * n_group + group) * n_query + i) * (S + L + n_query))[:, None]
    for j0 in range(0, S, COLUMNS):
        s = j0 + tl.arange(0, COLUMNS)
        scores = cache_scores(q_tile, code, count, s, d, sees_cache, S, DK, PRECISION, WIDEN)
        w = tl.exp(scores - norm[:, None]).to(weights.dtype.element_ty)
        tl.store(weights + s[None, :], w, mask=inside[:, None] & (s < S)[None, :])
    for j0 in range(0, L, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k_prev, j, L, j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        w = tl.exp(scores - norm[:, None]).to(weights.dtype.element_ty)
        tl.store(weights + (S + j)[None, :], w, mask=inside[:, None] & (j < L)[None, :])
    for j0 in range(0, n_query, COLUMNS):  # all columns, so that the future is zero
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k, j, n_query, L + j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        w = tl.exp(scores - norm[:, None]).to(weights.dtype.element_ty)
        mask = inside[:, None] & (j < n_query)[None, :]
        tl.store(weights + (S + L + j)[None, :], w, mask=mask)


@triton.jit
def softmax_backward(
    weights, d_weights, d_by_distance,
    n_blocks, n_query, n_group,
    L: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Gradient of the scores, in place of that of the weights: `fused._softmax_backward`.

    Also the gradient of the positional scores, [B, G, T, L + 1], as `tiles.Tile.by_distance`: each
    of them is part of exactly one score.
    """
    tile, n, bg = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tile * ROWS + tl.arange(0, ROWS)
    inside = (i < n_query)[:, None]
    n_columns = S + L + n_query
    block = (bg // n_group) * n_blocks + n
    row = (((block * n_group + bg % n_group) * n_query + i) * n_columns)[:, None]
    d_bias = d_by_distance + (((bg * n_blocks + n) * n_query + i) * (L + 1))[:, None]
    mean = tl.zeros((ROWS,), tl.float32)
    for c0 in range(0, n_columns, COLUMNS):
        c = (c0 + tl.arange(0, COLUMNS))[None, :]
        mask = inside & (c < n_columns)
        w = tl.load(weights + row + c, mask=mask, other=0.0).to(tl.float32)
        d_w = tl.load(d_weights + row + c, mask=mask, other=0.0).to(tl.float32)
        mean += tl.sum(w * d_w, 1)
    for c0 in range(0, n_columns, COLUMNS):
        c = (c0 + tl.arange(0, COLUMNS))[None, :]
        mask = inside & (c < n_columns)
        w = tl.load(weights + row + c, mask=mask, other=0.0).to(tl.float32)
        d_w = tl.load(d_weights + row + c, mask=mask, other=0.0).to(tl.float32)
        d_score = w * (d_w - mean[:, None])
        tl.store(d_weights + row + c, d_score.to(d_weights.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            column = c - S - i[:, None]
            near = mask & (column >= 0) & (column <= L)
            tl.store(d_bias + column, d_score.to(d_by_distance.dtype.element_ty), mask=near)
