"""The nearest code of each key."""

import triton
import triton.language as tl

from transformer_vq.ops.triton.kernels.scores import load_rows


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
