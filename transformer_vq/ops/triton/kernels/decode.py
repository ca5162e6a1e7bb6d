"""One decoded token per row: its attention, and the writes to window and cache, in one kernel."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.flash import online_values
from transformer_vq.ops.triton.kernels.scores import dot, load_rows


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
