"""Kernels of codes: the nearest code, the cache before each block, and decoding one token.

Conventions as in `attention_kernels`.
"""

import triton
import triton.language as tl

from transformer_vq.ops.triton.attention_kernels import dot, load_rows, online_values


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


@triton.jit
def nearest_code(
    k, code, half_norm, z,
    seq_len, n_head,
    S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Index of the nearest codeword, the first of equals: `nn.quantizer.nearest_code`.

    The nearest codeword has the largest k . c - |c|^2 / 2. k: [B, seq_len, DK] and code:
    [h, S, DK] in float32, half_norm: [h, S], z: [B, seq_len] of int64.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    keys = load_rows(k + bh * seq_len * DK, i, i < seq_len, d, DK)
    code += (bh % n_head) * S * DK
    half_norm += (bh % n_head) * S
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    nearest = tl.zeros((ROWS,), tl.int32)
    for s0 in range(0, S, COLUMNS):
        s = s0 + tl.arange(0, COLUMNS)
        c = load_rows(code, s, s < S, d, DK)
        near = tl.dot(keys, tl.trans(c), input_precision=PRECISION)
        near -= tl.load(half_norm + s, mask=s < S, other=0.0)[None, :]
        near = tl.where((s < S)[None, :], near, float("-inf"))
        top, at = tl.max(near, 1, return_indices=True)
        nearest = tl.where(top > best, s0 + at, nearest)
        best = tl.maximum(top, best)
    tl.store(z + bh * seq_len + i, nearest.to(tl.int64), mask=i < seq_len)


@triton.jit
def decode_token(
    code_scores, position_scores, q, z_new, k_new, v_new, z_evicted, mean_evicted,
    values, z, k, mean, log_count, slot, out,
    n_group, n_head, d_v,
    code_row, code_head, code_group, position_row, position_head, position_group,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_MEAN: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend from one token to itself, the window and the cache: `decode.attend_one_`.

    One program per row and columns of the values; the ROWS query heads of a key head are the rows
    of its tiles. What a program writes (the token's slot, and the mean with the evicted token) it
    takes from its arguments instead of reading it, so no program depends on another one.
    """
    chunk, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n_slots: tl.constexpr = L + 1
    b, h = r // n_head, r % n_head
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    e = chunk * VALUES + tl.arange(0, VALUES)
    here = tl.load(slot + r)
    own_code = tl.load(z_new + r)
    own_value = tl.load(v_new + r * d_v + e, mask=e < d_v, other=0.0).to(values.dtype.element_ty)
    if HAS_KEYS:
        q_tile = load_rows(q + r * n_group * DK, g, g < n_group, d, DK)
        own_key = tl.load(k_new + r * DK + d, mask=d < DK, other=0.0).to(k.dtype.element_ty)
    code_scores += b * code_row + h * code_head + g * code_group
    position_scores += b * position_row + h * position_head + g * position_group
    log_count += r * (n_slots + S)
    values += r * (n_slots + S) * d_v

    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUES), tl.float32)
    for j0 in range(0, n_slots, COLUMNS):
        x = j0 + tl.arange(0, COLUMNS)
        log_n = tl.load(log_count + x, mask=x < n_slots, other=float("-inf")).to(tl.float32)
        filled = log_n > float("-inf")
        past = filled & (x != here)
        mask = (g < n_group)[:, None] & filled[None, :]
        if HAS_KEYS:
            keys = load_rows(k + r * n_slots * DK, x, past, d, DK)
            keys = tl.where((x == here)[:, None], own_key[None, :], keys).to(q_tile.dtype)
            zero = tl.zeros((ROWS, COLUMNS), tl.float32)
            scores = dot(q_tile, tl.trans(keys), zero, PRECISION, WIDEN)
        else:
            codes = tl.load(z + r * n_slots + x, mask=past, other=0)
            codes = tl.where(x == here, own_code, codes)
            scores = tl.load(code_scores[:, None] + codes[None, :], mask=mask, other=0.0)
            scores = scores.to(tl.float32)
        if HAS_BIAS:
            column = (x - here + L) % n_slots  # L - distance
            bias = tl.load(position_scores[:, None] + column[None, :], mask=mask, other=0.0)
            scores += bias.to(tl.float32)
        tile = load_rows(values, x, past, e, d_v)
        tile = tl.where((x == here)[:, None], own_value[None, :], tile)
        scores += log_n[None, :]
        highest, total, output = online_values(
            scores, tile, highest, total, output, PRECISION, WIDEN
        )
    if S > 0:
        evicted = tl.load(z_evicted + r)
        new_mean = tl.load(mean_evicted + r * d_v + e, mask=e < d_v, other=0.0)
        rounded_mean = new_mean.to(values.dtype.element_ty)
        for j0 in range(0, S, COLUMNS):
            s = j0 + tl.arange(0, COLUMNS)
            log_n = tl.load(log_count + n_slots + s, mask=s < S, other=float("-inf"))
            mask = (g < n_group)[:, None] & (s < S)[None, :]
            scores = tl.load(code_scores[:, None] + s[None, :], mask=mask, other=0.0)
            scores = scores.to(tl.float32) + log_n.to(tl.float32)[None, :]
            tile = load_rows(values, n_slots + s, (s < S) & (s != evicted), e, d_v)
            tile = tl.where((s == evicted)[:, None], rounded_mean[None, :], tile)
            highest, total, output = online_values(
                scores, tile, highest, total, output, PRECISION, WIDEN
            )
        tl.store(values + (n_slots + evicted) * d_v + e, rounded_mean, mask=e < d_v)
        if HAS_MEAN:
            tl.store(mean + (r * S + evicted) * d_v + e, new_mean, mask=e < d_v)
    place = (r * n_group + g)[:, None] * d_v + e[None, :]
    mask = (g < n_group)[:, None] & (e < d_v)[None, :]
    tl.store(out + place, (output / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(values + here * d_v + e, own_value, mask=e < d_v)
    tl.store(z + r * n_slots + here, own_code, mask=chunk == 0)
    if HAS_KEYS:
        tl.store(k + (r * n_slots + here) * DK + d, own_key, mask=(d < DK) & (chunk == 0))
