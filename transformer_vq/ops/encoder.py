"""Attention without a mask in linear time (Theorems 3.4 and 3.5).

Without mask and bias, all keys with the same code have the same weight. So a query only scores the
S codewords, weighted by the count and mean value of each (`block_stats`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_vq.ops.cache import block_stats
from transformer_vq.ops.quadratic import Phi, attention_weights
from transformer_vq.ops.runtime import check_shapes


def encoder_attention(
    q: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    *,
    phi: Phi | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Attend from every query to every key, with element-wise phi (Theorem 3.4) or softmax (3.5).

    q: [b, h, g, i, k], z: [b, h, j], v: [b, h, j, v], codebook: [h, s, k], valid: [b, j]
    -> [b, h, g, i, v].
    """
    check_shapes(q=(q, "bhgik"), z=(z, "bhj"), v=(v, "bhjv"), codebook=(codebook, "hsk"))
    stats = block_stats(z, v, codebook.shape[-2], None if valid is None else valid[:, None])
    scores = torch.einsum("bhgik,hsk->bhgis", q, codebook)
    weights = attention_weights(scores, phi, stats.count.unsqueeze(2)).to(v.dtype)
    return torch.einsum("bhgis,bhsv->bhgiv", weights, stats.mean.to(v.dtype))
