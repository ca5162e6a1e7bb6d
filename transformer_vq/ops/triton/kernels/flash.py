"""Attention of blocks in one kernel, for values as narrow as keys (MHA, MQA, GQA)."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.scores import (
    block_keys,
    cache_scores,
    dot,
    load_rows,
    local_scores,
    query_tile,
)


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
