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
def block_tile(
    q, k_prev, k, by_distance, code, count, start,
    n_blocks, n_query, n_group, n_head, start_row, start_step,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The tile of queries of this program, and pointers to what its block attends to.

    The number of the block, places i of the queries in it, whether they are inside of it, rows of
    [B, G, T], the queries, pointers to their positional scores, the first place of both blocks
    that each one sees, and whether it sees the cache; keys before the block, its own, codewords and
    their counts.
    """
    n, bg = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    bh = bg // n_group
    block = bh * n_blocks + n
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < n_query
    t = n * n_query + i
    row = bg * n_blocks * n_query + t
    queries = load_rows(q, row, inside, tl.arange(0, D), DK)
    # A query attends to nothing before `start`, relative to the first token of the segment.
    first = tl.load(start + bh // n_head * start_row + t * start_step, mask=inside, other=0)
    first = first - (n * n_query - L)
    sees_cache = (first < 0) | (not HAS_DOCUMENTS)
    k_prev += block * L * DK
    k += block * n_query * DK
    code += (bh % n_head) * S * DK
    count += (block + bh) * S  # of n_blocks + 1 per row
    bias = by_distance + row * (L + 1)
    return block, i, inside, row, queries, bias, first, sees_cache, k_prev, k, code, count


@triton.jit
def part_scores(
    PART: tl.constexpr, j, q, k_prev, k, code, count, i, n_query, first, sees_cache, by_distance,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of columns j of a part: the cache (0), the previous block (1) or the block itself (2).

    Those of codes are content and the logarithm of the count, -inf for an empty code; those of
    keys are content and position, -inf where masked. first: [rows] the first visible place of both
    blocks, by_distance: [rows] pointers to the positional scores of each query.
    """
    base = code if PART == 0 else k_prev if PART == 1 else k
    n_keys = S if PART == 0 else L if PART == 1 else n_query
    keys = load_rows(base, j, j < n_keys, tl.arange(0, D), DK)
    zero = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
    scores = dot(q, tl.trans(keys), zero, PRECISION, WIDEN)
    if PART == 0:
        n = tl.load(count + j, mask=j < S, other=0)
        log_n = tl.where(n > 0, tl.log(tl.maximum(n, 1).to(tl.float32)), float("-inf"))
        scores += log_n[None, :]
        visible = sees_cache[:, None]
    else:
        x = j if PART == 1 else L + j  # place in both blocks
        column = x[None, :] - i[:, None]  # of by_distance: L - distance
        visible = (column <= L) & (x[None, :] >= first[:, None]) & (j < n_keys)[None, :]
        if S == 0:
            visible = visible & (column >= 0)
        if HAS_BIAS:
            near = (column >= 0) & visible & (i < n_query)[:, None]
            bias = tl.load(by_distance[:, None] + column, mask=near, other=0.0)
            scores += bias.to(tl.float32)
    return tl.where(visible, scores, float("-inf"))


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
    _, i, inside, row, q_tile, bias, first, sees_cache, k_prev, k, code, count = block_tile(
        q, k_prev, k, by_distance, code, count, start,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, S, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    end = tl.minimum(tl.program_id(0) * ROWS + ROWS, n_query)  # later keys are in the future

    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(3):
        for j0 in range(0, S if part == 0 else L if part == 1 else end, COLUMNS):
            scores = part_scores(
                part, j0 + tl.arange(0, COLUMNS), q_tile, k_prev, k, code, count, i, n_query,
                first, sees_cache, bias, L, S, DK, D, HAS_BIAS, PRECISION, WIDEN,
            )  # fmt: skip
            new = tl.maximum(highest, tl.max(scores, 1))
            total = total * tl.exp(highest - new) + tl.sum(tl.exp(scores - new[:, None]), 1)
            highest = new
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
    block, i, inside, row, q_tile, bias, first, sees_cache, k_prev, k, code, count = block_tile(
        q, k_prev, k, by_distance, code, count, start,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, S, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    norm = tl.load(lse + row, mask=inside, other=0.0)

    group = tl.program_id(2) % n_group
    weights += (((block * n_group + group) * n_query + i) * (S + L + n_query))[:, None]
    for part in tl.static_range(3):
        n_keys = S if part == 0 else L if part == 1 else n_query  # all, so that the future is zero
        before = 0 if part == 0 else S if part == 1 else S + L
        for j0 in range(0, n_keys, COLUMNS):
            j = j0 + tl.arange(0, COLUMNS)
            scores = part_scores(
                part, j, q_tile, k_prev, k, code, count, i, n_query, first, sees_cache, bias,
                L, S, DK, D, HAS_BIAS, PRECISION, WIDEN,
            )  # fmt: skip
            w = tl.exp(scores - norm[:, None]).to(weights.dtype.element_ty)
            mask = inside[:, None] & (j < n_keys)[None, :]
            tl.store(weights + (before + j)[None, :], w, mask=mask)


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
    block, i, inside, row, q_tile, bias, first, sees_cache, k_prev, k, code, count = block_tile(
        q, k_prev, k, by_distance, code, count, start,
        n_blocks, n_query, n_group, n_head, start_row, start_step, L, S, DK, D, ROWS, HAS_DOCUMENTS,
    )  # fmt: skip
    e = tl.arange(0, V)
    mean += block * S * DV
    v_prev += block * L * DV
    v += block * n_query * DV
    end = tl.minimum(tl.program_id(0) * ROWS + ROWS, n_query)

    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, V), tl.float32)
    for part in tl.static_range(3):
        base = mean if part == 0 else v_prev if part == 1 else v
        n_keys = S if part == 0 else L if part == 1 else n_query
        for j0 in range(0, n_keys if part < 2 else end, COLUMNS):
            j = j0 + tl.arange(0, COLUMNS)
            scores = part_scores(
                part, j, q_tile, k_prev, k, code, count, i, n_query, first, sees_cache, bias,
                L, S, DK, D, HAS_BIAS, PRECISION, WIDEN,
            )  # fmt: skip
            values = load_rows(base, j, j < n_keys, e, DV)
            highest, total, output = online_values(
                scores, values, highest, total, output, PRECISION, WIDEN
            )
    tl.store(lse + row, highest + tl.log(total), mask=inside)
    output = (output / total[:, None]).to(out.dtype.element_ty)
    mask = inside[:, None] & (e < DV)[None, :]
    tl.store(out + row[:, None] * DV + e[None, :], output, mask=mask)
