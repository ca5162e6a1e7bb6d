"""One decoded token per row: attention and eviction in one kernel."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.flash import online_values
from transformer_vq.ops.triton.kernels.scores import cache_scores, dot, load_rows


@triton.jit
def decode_token(
    q, k_new, z_new, v_new, code, by_distance,
    ring_k, ring_v, ring_z, position, slot, mean, count, arrived, out,
    n_group, n_head, n_rows, d_v,
    L: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend from one token to cache, window and itself, then update both: `decode.attend_one_`.

    One program per row and columns of the values; the ROWS query heads of a key head are the rows
    of its tiles. The window is a ring of L + 1 slots. A program writes its columns of the values
    and of the mean. Everything that all programs read (counts, positions, the slot) is written by
    the last program to arrive; `arrived` counts them and is zero between launches.
    """
    chunk, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n_slots: tl.constexpr = L + 1
    b = bh // n_head
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    e = chunk * VALUES + tl.arange(0, VALUES)
    here = tl.load(slot)
    n_past = tl.load(position + b)
    oldest = (here + 1) % n_slots
    q_tile = load_rows(q + bh * n_group * DK, g, g < n_group, d, DK)
    bias = by_distance + (bh * n_group + g) * n_slots

    # The token itself comes first, so the maximum is finite; its slot of the ring is not read.
    own_key = tl.load(k_new + bh * DK + d, mask=d < DK, other=0.0)
    own_value = tl.load(v_new + bh * d_v + e, mask=e < d_v, other=0.0)
    highest = tl.sum(q_tile.to(tl.float32) * own_key.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        highest += tl.load(bias + L, mask=g < n_group, other=0.0).to(tl.float32)
    total = tl.full((ROWS,), 1.0, tl.float32)
    output = tl.zeros((ROWS, VALUES), tl.float32) + own_value.to(tl.float32)[None, :]
    for j0 in range(0, n_slots, COLUMNS):
        x = j0 + tl.arange(0, COLUMNS)
        column = (x - here + n_slots - 1) % n_slots  # of by_distance: L - distance
        filled = (x < n_slots) & (x != here) & (column >= L - n_past)
        keys = load_rows(ring_k + bh * n_slots * DK, x, filled, d, DK)
        zero = tl.zeros((ROWS, COLUMNS), tl.float32)
        scores = dot(q_tile, tl.trans(keys), zero, PRECISION, WIDEN)
        if HAS_BIAS:
            mask = (g < n_group)[:, None] & filled[None, :]
            scores += tl.load(bias[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(filled[None, :], scores, float("-inf"))
        values = load_rows(ring_v + bh * n_slots * d_v, x, filled, e, d_v)
        highest, total, output = online_values(
            scores, values, highest, total, output, PRECISION, WIDEN
        )
    everywhere = g >= 0
    for j0 in range(0, S, COLUMNS):
        s = j0 + tl.arange(0, COLUMNS)
        scores = cache_scores(
            q_tile, code + (bh % n_head) * S * DK, count + bh * S, s, d, everywhere,
            S, DK, PRECISION, WIDEN,
        )  # fmt: skip
        values = load_rows(mean + bh * S * d_v, s, s < S, e, d_v).to(own_value.dtype)
        highest, total, output = online_values(
            scores, values, highest, total, output, PRECISION, WIDEN
        )
    place = (bh * n_group + g)[:, None] * d_v + e[None, :]
    mask = (g < n_group)[:, None] & (e < d_v)[None, :]
    tl.store(out + place, (output / total[:, None]).to(out.dtype.element_ty), mask=mask)

    tl.debug_barrier()  # all threads have read mean and counts
    if S > 0:  # evict the oldest token
        z_old = tl.load(ring_z + bh * n_slots + oldest)
        v_old = tl.load(ring_v + (bh * n_slots + oldest) * d_v + e, mask=e < d_v, other=0.0)
        n_old = tl.load(count + bh * S + z_old)
        into = mean + (bh * S + z_old) * d_v + e
        before = tl.load(into, mask=e < d_v, other=0.0)
        share = 1.0 / (n_old + 1).to(tl.float32)
        after = before + (v_old.to(tl.float32) - before) * share
        tl.store(into, after, mask=(e < d_v) & (n_past >= L))
    tl.store(ring_v + (bh * n_slots + here) * d_v + e, own_value, mask=e < d_v)
    tl.store(ring_k + (bh * n_slots + here) * DK + d, own_key, mask=(d < DK) & (chunk == 0))
    tl.store(ring_z + bh * n_slots + here, tl.load(z_new + bh), mask=chunk == 0)

    tl.debug_barrier()  # before this program counts as done
    n_programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(arrived, 1, sem="acq_rel") == n_programs - 1:
        for r0 in range(0, n_rows, COLUMNS):
            r = (r0 + tl.arange(0, COLUMNS)).to(tl.int64)
            if S > 0:
                codes = tl.load(ring_z + r * n_slots + oldest, mask=r < n_rows, other=0)
                past = tl.load(position + r // n_head, mask=r < n_rows, other=0)
                cells = count + r * S + codes
                counts = tl.load(cells, mask=r < n_rows, other=0)
                tl.store(cells, counts + 1, mask=(r < n_rows) & (past >= L))
        tl.debug_barrier()  # positions are read above
        for r0 in range(0, n_rows // n_head, COLUMNS):
            r = (r0 + tl.arange(0, COLUMNS)).to(tl.int64)
            past = tl.load(position + r, mask=r < n_rows // n_head, other=0)
            tl.store(position + r, past + 1, mask=r < n_rows // n_head)
        tl.store(slot, oldest)
        tl.store(arrived, 0)
