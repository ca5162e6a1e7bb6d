"""Kernels of attention within blocks: scores, weights, their gradient, and the output in one pass.

Plain pointers to contiguous tensors; constants are in capitals. B is b * h, the rows of keys and
values; each has G query heads. A segment has `n_blocks` blocks of `n_query` tokens; the block
before each one has L tokens. Sizes need not be powers of two: tiles overhang and are masked.
`fused.tile_scores` is the reference of the scores.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + a b, accumulated in float32."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def load_rows(base, rows, inside, d, D):
    """Rows of a matrix with D columns: [rows, d]; zero outside."""
    mask = inside[:, None] & (d < D)[None, :]
    return tl.load(base + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def query_tile(
    q, by_distance, start, tile, n, bg,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, DK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of block n.

    Places i in the block, whether they are inside of it, rows of [B, G, T], the queries, pointers
    to their positional scores, the first place of both blocks that each one sees, and whether it
    sees the cache.
    """
    i = tile * ROWS + tl.arange(0, ROWS)
    inside = i < n_query
    t = n * n_query + i
    row = bg * n_blocks * n_query + t
    queries = load_rows(q, row, inside, tl.arange(0, D), DK)
    # A query attends to nothing before `start`, relative to the first token of the segment.
    b = bg // n_group // n_head
    first = tl.load(start + b * start_row + t * start_step, mask=inside, other=0)
    first = first - (n * n_query - L)
    sees_cache = (first < 0) | (not HAS_DOCUMENTS)
    return i, inside, row, queries, by_distance + row * (L + 1), first, sees_cache


@triton.jit
def block_keys(
    k_prev, k, code, count, n, bh, n_blocks, n_query, n_head,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    """Pointers to what block n attends to: keys before it, its own, codewords and their counts."""
    block = bh * n_blocks + n
    k_prev += block * L * DK
    k += block * n_query * DK
    code += (bh % n_head) * S * DK
    count += (bh * (n_blocks + 1) + n) * S
    return k_prev, k, code, count


@triton.jit
def cache_scores(
    q, code, count, s, d, sees_cache,
    S: tl.constexpr, DK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of codes: content and the logarithm of the count; -inf for an empty code."""
    c = load_rows(code, s, s < S, d, DK)
    n = tl.load(count + s, mask=s < S, other=0)
    log_n = tl.where(n > 0, tl.log(tl.maximum(n, 1).to(tl.float32)), float("-inf"))
    zero = tl.zeros((q.shape[0], c.shape[0]), tl.float32)
    scores = dot(q, tl.trans(c), zero, PRECISION, WIDEN) + log_n[None, :]
    return tl.where(sees_cache[:, None], scores, float("-inf"))


@triton.jit
def local_scores(
    q, keys, j, n_keys, x, i, n_query, first, by_distance, d,
    L: tl.constexpr, DK: tl.constexpr, HAS_CACHE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of keys j of the previous block or of the block itself; -inf where masked.

    x: place of the keys in both blocks, first: [rows] the first visible place, by_distance: [rows]
    pointers to the positional scores of each query.
    """
    k = load_rows(keys, j, j < n_keys, d, DK)
    zero = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    scores = dot(q, tl.trans(k), zero, PRECISION, WIDEN)
    column = x[None, :] - i[:, None]  # of by_distance: L - distance
    visible = (column <= L) & (x[None, :] >= first[:, None]) & (j < n_keys)[None, :]
    if not HAS_CACHE:
        visible = visible & (column >= 0)
    if HAS_BIAS:
        near = (column >= 0) & visible & (i < n_query)[:, None]
        bias = tl.load(by_distance[:, None] + column, mask=near, other=0.0)
        scores += bias.to(tl.float32)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def online_sum(scores, highest, total):
    """Include a tile in the running maximum and the sum of exponentials relative to it."""
    new = tl.maximum(highest, tl.max(scores, 1))
    total = total * tl.exp(highest - new) + tl.sum(tl.exp(scores - new[:, None]), 1)
    return new, total


@triton.jit
def block_lse(
    q, k_prev, k, by_distance, code, count, start, lse,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Log of the softmax's sum over cache, previous block and own block: [B, G, T].

    `fused.tile_scores(...).logsumexp(-1)`, with one maximum over all columns. One program per tile
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
    """Softmax over cache, previous block and own block: `fused.tile_scores(...).softmax(-1)`.

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
    """Gradient of the scores, in place of that of the weights: `fused.SOFTMAX_BACKWARD`.

    Also the gradient of the positional scores, [B, G, T, L + 1], as `fused.Tile.by_distance`: each
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


@triton.jit
def online_values(
    scores, values, highest, total, output, PRECISION: tl.constexpr, WIDEN: tl.constexpr
):
    """Include a tile of columns in the running softmax and the weighted values."""
    new = tl.maximum(highest, tl.max(scores, 1))
    w = tl.exp(scores - new[:, None])
    scale = tl.exp(highest - new)
    total = total * scale + tl.sum(w, 1)
    output = dot(w.to(values.dtype), values, output * scale[:, None], PRECISION, WIDEN)
    return new, total, output


@triton.jit
def flash_blocks(
    q, k_prev, k, v_prev, v, mean, by_distance, code, count, start, out, lse,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Output of blocks without their weights in memory: the forward pass of `fused.attend_blocks`.

    One program per tile of queries, all V >= DV columns of the values. out: [B, G, T, DV], lse:
    [B, G, T], the log of the softmax's sum, from which `block_weights` recomputes the weights.
    """
    tile, n, bg = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    bh = bg // n_group
    d, e = tl.arange(0, D), tl.arange(0, V)
    i, inside, row, q_tile, bias, first, sees_cache = query_tile(
        q, by_distance, start, tile, n, bg,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    k_prev, k, code, count = block_keys(
        k_prev, k, code, count, n, bh, n_blocks, n_query, n_head, L, S, DK
    )
    block = bh * n_blocks + n
    mean += block * S * DV
    v_prev += block * L * DV
    v += block * n_query * DV
    end = tl.minimum(tile * ROWS + ROWS, n_query)

    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, V), tl.float32)
    for j0 in range(0, S, COLUMNS):
        s = j0 + tl.arange(0, COLUMNS)
        scores = cache_scores(q_tile, code, count, s, d, sees_cache, S, DK, PRECISION, WIDEN)
        values = load_rows(mean, s, s < S, e, DV)
        highest, total, output = online_values(
            scores, values, highest, total, output, PRECISION, WIDEN
        )
    for j0 in range(0, L, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k_prev, j, L, j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        values = load_rows(v_prev, j, j < L, e, DV)
        highest, total, output = online_values(
            scores, values, highest, total, output, PRECISION, WIDEN
        )
    for j0 in range(0, end, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        scores = local_scores(
            q_tile, k, j, n_query, L + j, i, n_query, first, bias, d,
            L, DK, S > 0, HAS_BIAS, PRECISION, WIDEN,
        )  # fmt: skip
        values = load_rows(v, j, j < n_query, e, DV)
        highest, total, output = online_values(
            scores, values, highest, total, output, PRECISION, WIDEN
        )
    tl.store(lse + row, highest + tl.log(total), mask=inside)
    output = (output / total[:, None]).to(out.dtype.element_ty)
    mask = inside[:, None] & (e < DV)[None, :]
    tl.store(out + row[:, None] * DV + e[None, :], output, mask=mask)
