"""Scores of a tile of queries and a tile of columns; `tiles.tile_scores` is the reference."""

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
