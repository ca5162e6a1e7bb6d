"""Decode one token per row with one kernel."""

from __future__ import annotations

from torch import Tensor

from transformer_vq.ops.triton.kernels import decode as kernels
from transformer_vq.ops.triton.launch import dot_constants, fit, launch, n_tiles, tiles_of


def decode_token_(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor | None,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_z: Tensor,
    position: Tensor,
    slot: Tensor,
    mean: Tensor | None,
    count: Tensor | None,
    arrived: Tensor,
) -> Tensor:
    """Return what `decode.attend_one_` returns, and update the same tensors in place.

    q: [b, h, g, k], k_hat: [b, h, k], z: [b, h], v: [b, h, v], codebook: [h, s, k], by_distance:
    [b, h, g, L + 1] -> [b, h, g, v]. ring_k: [b, h, L + 1, k], ring_v: [b, h, L + 1, v], ring_z:
    [b, h, L + 1], position: [b], slot: [1], mean: [b, h, s, v] in float32 and count: [b, h, s],
    None without a cache; contiguous. arrived: [1] of int32, zero, as scratch memory for launches
    that run one after the other.
    """
    b, h, n_group, d_k = q.shape
    d_v, n_slots = v.shape[-1], ring_k.shape[-2]
    n_code = 0 if count is None else count.shape[-1]
    for x in (ring_k, ring_v, ring_z, position, slot, mean, count):
        if x is not None and not x.is_contiguous():
            raise ValueError("tensors that are updated in place must be contiguous")
    out = v.new_empty(b, h, n_group, d_v)
    tiles = tiles_of("decode_token", v.dtype)
    values = fit(d_v, tiles.values)
    launch(
        kernels.decode_token,
        (n_tiles(d_v, values), b * h),
        {
            "q": q.contiguous(),
            "k_new": k_hat.contiguous(),
            "z_new": z.contiguous(),
            "v_new": v.contiguous(),
            "code": codebook.to(q.dtype).contiguous(),
            "by_distance": q if by_distance is None else by_distance.contiguous(),
            "ring_k": ring_k,
            "ring_v": ring_v,
            "ring_z": ring_z,
            "position": position,
            "slot": slot,
            "mean": v if mean is None else mean,
            "count": position if count is None else count,
            "arrived": arrived,
            "out": out,
            "n_group": n_group,
            "n_head": h,
            "n_rows": b * h,
            "d_v": d_v,
        },
        {
            "L": n_slots - 1,
            "S": n_code,
            "DK": d_k,
            "D": fit(d_k, 2**16),
            "ROWS": fit(n_group, 2**16),
            "COLUMNS": fit(max(n_slots, n_code), tiles.columns),
            "VALUES": values,
            "HAS_BIAS": by_distance is not None,
            **dot_constants(v.dtype),
        },
        tiles,
    )
    return out
