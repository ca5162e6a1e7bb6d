"""The nearest code of each key, by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_vq.ops.triton.kernels import nearest as kernels
from transformer_vq.ops.triton.launch import dot_constants, fit, launch, n_tiles, tiles_of


def nearest_code(k: Tensor, codebook: Tensor) -> Tensor:
    """Return `nn.quantizer.nearest_code`, in float32. k: [b, h, t, k], codebook: [h, s, k]."""
    k, codebook = k.float().contiguous(), codebook.float().contiguous()
    (b, h, t, d_k), n_code = k.shape, codebook.shape[1]
    z = torch.empty(b, h, t, dtype=torch.int64, device=k.device)
    tiles = tiles_of("nearest_code", k.dtype)
    rows = fit(t, tiles.rows)
    launch(
        kernels.nearest_code,
        (n_tiles(t, rows), b * h),
        {
            "k": k,
            "code": codebook,
            "half_norm": codebook.square().sum(-1) / 2,
            "z": z,
            "seq_len": t,
            "n_head": h,
        },
        {
            "S": n_code,
            "DK": d_k,
            "D": fit(d_k, 2**16),
            "ROWS": rows,
            "COLUMNS": fit(n_code, tiles.columns),
            "PRECISION": dot_constants(k.dtype, exact=True)["PRECISION"],
        },
        tiles,
    )
    return z
