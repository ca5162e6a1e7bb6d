"""The cache before each block, and its gradient."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.scores import dot, load_rows


@triton.jit
def cache_prefix(
    z, v, counted, carry, mean, count, means, counts, mean_after,
    n_blocks, n_query, n_head, d_v,
    L: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, HAS_CARRY: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Means and counts before each block, and after the last: `reductions.exclusive_prefix`.

    One program per tile of codes and columns of the values, through all blocks in order, with the
    merges of `cache.merge` in float32. z: [B, n_blocks, L] and v: [B, n_blocks, L, d_v] of the
    previous blocks, whose first n_query tokens are evicted where counted: [b, n_blocks, n_query].
    carry: [b, n_blocks], 0 where a document starts. means: [B, n_blocks, S, d_v], counts:
    [B, n_blocks + 1, S], mean_after: [B, S, d_v].
    """
    chunk, tile, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b = bh // n_head
    s = tile * ROWS + tl.arange(0, ROWS)
    e = chunk * VALUES + tl.arange(0, VALUES)
    inside = (s < S)[:, None] & (e < d_v)[None, :]
    cell = s[:, None] * d_v + e[None, :]
    running = tl.load(mean + bh * S * d_v + cell, mask=inside, other=0.0)
    n_tokens = tl.load(count + bh * S + s, mask=s < S, other=0)
    counts += bh * (n_blocks + 1) * S
    for n in range(0, n_blocks):
        block = bh * n_blocks + n
        now = running.to(means.dtype.element_ty)
        tl.store(means + block * S * d_v + cell, now, mask=inside)
        tl.store(counts + n * S + s, n_tokens, mask=(s < S) & (chunk == 0))
        total = tl.zeros((ROWS, VALUES), tl.float32)
        n_new = tl.zeros((ROWS,), tl.int32)
        for j0 in range(0, n_query, COLUMNS):
            j = j0 + tl.arange(0, COLUMNS)
            codes = tl.load(z + block * L + j, mask=j < n_query, other=-1)
            place = counted + (b * n_blocks + n) * n_query + j
            counts_here = tl.load(place, mask=j < n_query, other=0) != 0
            values = load_rows(v + block * L * d_v, j, j < n_query, e, d_v)
            one_hot = (codes[None, :] == s[:, None]) & counts_here[None, :]
            hot = one_hot.to(tl.float32).to(values.dtype)
            total = dot(hot, values, total, PRECISION, WIDEN)
            n_new += tl.sum(one_hot.to(tl.int32), 1)
        if HAS_CARRY:
            n_tokens *= tl.load(carry + b * n_blocks + n)
        n_tokens += n_new
        share = n_new.to(tl.float32) / tl.maximum(n_tokens, 1).to(tl.float32)
        new = total / tl.maximum(n_new, 1).to(tl.float32)[:, None]
        running += (new - running) * share[:, None]
    tl.store(mean_after + bh * S * d_v + cell, running, mask=inside)
    tl.store(counts + n_blocks * S + s, n_tokens, mask=(s < S) & (chunk == 0))


@triton.jit
def cache_suffix(
    d_means, counts, carry, d_after, sums, d_mean,
    n_blocks, n_head, d_v,
    S: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_AFTER: tl.constexpr,
):  # fmt: skip
    """Reverse scan: the gradient U of the sums after each block, as in `fused._Attention.backward`.

    U_n = carry_n U_{n+1} + d_means_n / counts_n, from the last block to the first. d_means:
    [B, n_blocks, S, d_v], d_after: [B, S, d_v], sums: [B, n_blocks, S, d_v], U_{n+1} for block n,
    d_mean: [B, S, d_v], the gradient of the mean before the segment.
    """
    chunk, tile, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    s = tile * ROWS + tl.arange(0, ROWS)
    e = chunk * VALUES + tl.arange(0, VALUES)
    inside = (s < S)[:, None] & (e < d_v)[None, :]
    cell = s[:, None] * d_v + e[None, :]
    counts += bh * (n_blocks + 1) * S
    u = tl.zeros((ROWS, VALUES), tl.float32)
    if HAS_AFTER:
        n_tokens = tl.load(counts + n_blocks * S + s, mask=s < S, other=1)
        u += tl.load(d_after + bh * S * d_v + cell, mask=inside, other=0.0).to(tl.float32)
        u = u / tl.maximum(n_tokens, 1).to(tl.float32)[:, None]
    for back in range(0, n_blocks):
        n = n_blocks - 1 - back
        block = (bh * n_blocks + n) * S * d_v
        tl.store(sums + block + cell, u, mask=inside)
        if HAS_CARRY:
            u *= tl.load(carry + (bh // n_head) * n_blocks + n).to(tl.float32)
        n_tokens = tl.load(counts + n * S + s, mask=s < S, other=1)
        d = tl.load(d_means + block + cell, mask=inside, other=0.0).to(tl.float32)
        u += d / tl.maximum(n_tokens, 1).to(tl.float32)[:, None]
    n_tokens = tl.load(counts + s, mask=s < S, other=0).to(tl.float32)
    tl.store(d_mean + bh * S * d_v + cell, u * n_tokens[:, None], mask=inside)


@triton.jit
def evicted_gradient(
    sums, z, counted, d_v_prev,
    n_blocks, n_query, n_head, d_v,
    L: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Add to each evicted token's value the gradient of its code's sum: the gradient of
    `cache.code_sums` with respect to x.

    sums: as written by `cache_suffix`, d_v_prev: [B, n_blocks, L, d_v], updated in place.
    """
    chunk, tile = tl.program_id(0), tl.program_id(1)
    block = tl.program_id(2).to(tl.int64)  # of B * n_blocks
    b = block // n_blocks // n_head
    j = tile * ROWS + tl.arange(0, ROWS)
    e = chunk * VALUES + tl.arange(0, VALUES)
    place = counted + (b * n_blocks + block % n_blocks) * n_query + j
    counts_here = tl.load(place, mask=j < n_query, other=0) != 0
    codes = tl.load(z + block * L + j, mask=counts_here, other=0)
    mask = counts_here[:, None] & (e < d_v)[None, :]
    u = tl.load(sums + (block * S + codes)[:, None] * d_v + e[None, :], mask=mask, other=0.0)
    into = d_v_prev + (block * L + j)[:, None] * d_v + e[None, :]
    before = tl.load(into, mask=mask, other=0.0).to(tl.float32)
    tl.store(into, (before + u).to(d_v_prev.dtype.element_ty), mask=mask)
