"""Definition 3.1 in O(T^2): the reference given quantized keys, full attention given plain keys.

This module is simple on purpose; every fast implementation is tested to be equal to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.runtime import check_shapes

Phi = Callable[[Tensor], Tensor]
"""An element-wise nonlinearity phi_w with phi_w(-inf) = 0; None means softmax."""


def attention_weights(
    scores: Tensor, phi: Phi | None, multiplicity: Tensor | None = None
) -> Tensor:
    """Return phi_w of the scores, where each column represents `multiplicity` equal keys.

    scores: [..., i, j], multiplicity: [..., j], 0 for masked columns. Softmax is computed in
    float32 (or float64); the multiplicity enters as its logarithm, so subtracting the maximum over
    all columns keeps it stable.
    """
    scores = scores.to(accumulation_dtype(scores.dtype))
    if phi is not None:
        weights = phi(scores)
        return weights if multiplicity is None else weights * multiplicity.unsqueeze(-2)
    if multiplicity is not None:
        multiplicity = multiplicity.to(scores.dtype)
        bias = torch.where(multiplicity > 0, multiplicity.clamp(min=1).log(), -torch.inf)
        scores = scores + bias.unsqueeze(-2)
    return scores.softmax(dim=-1)


def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    phi: Phi | None = None,
    key_gradient: Tensor | None = None,
) -> Tensor:
    """Return W V of Definition 3.1 from all T x T scores.

    q: [b, h, g, i, k], k: [b, h, j, k], v: [b, h, j, v], bias: broadcastable to [b, h, g, i, j]
    -> [b, h, g, i, v]. key_gradient: [i, j], True where scores pass a gradient to the key; the
    linear-time form does so for the present and the previous block only.
    """
    check_shapes(q=(q, "bhgik"), k=(k, "bhjk"), v=(v, "bhjv"))
    scores = torch.einsum("bhgik,bhjk->bhgij", q, k)
    if key_gradient is not None:
        stopped = torch.einsum("bhgik,bhjk->bhgij", q, k.detach())
        scores = torch.where(key_gradient, scores, stopped)
    if bias is not None:
        scores = scores + bias
    weights = attention_weights(scores, phi).to(v.dtype)
    return torch.einsum("bhgij,bhjv->bhgiv", weights, v)


def distance_bias(by_distance: Tensor, block_len: int, *, window_only: bool = False) -> Tensor:
    """Return the bias B, looked up per distance: causal, zero (or -inf) beyond block_len.

    by_distance: [..., t, L + 1] for distances L, ..., 0 -> [..., i, j].
    """
    steps = torch.arange(by_distance.shape[-2], device=by_distance.device)
    distance = steps[:, None] - steps[None, :]
    column = (block_len - distance).clamp(0, block_len)
    bias = by_distance.gather(-1, column.expand(*by_distance.shape[:-1], len(steps)))
    bias = bias.masked_fill(distance > block_len, -torch.inf if window_only else 0.0)
    return bias.masked_fill(distance < 0, -torch.inf)


def quadratic_vq_attention(
    q: Tensor,
    k_hat: Tensor,
    v: Tensor,
    by_distance: Tensor,
    *,
    phi: Phi | None = None,
    window_only: bool = False,
    block_starts: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Return what `vq_attention` computes for a full sequence, in O(T^2), with its gradients.

    Shapes as there. In linear time, keys older than the previous block enter through the codebook,
    which has no gradient. block_starts: [t], the first token of each token's block, determines
    these keys; by default blocks start at the first token. visible: [b, i, j], the keys that a
    query may attend to, such as those of its own document.
    """
    seq_len, block_len = q.shape[-2], by_distance.shape[-1] - 1
    steps = torch.arange(seq_len, device=q.device)
    if block_starts is None:
        block_starts = steps // block_len * block_len
    bias = distance_bias(by_distance, block_len, window_only=window_only)
    if visible is not None:
        bias = bias.masked_fill(~visible[:, None, None], -torch.inf)
    key_gradient = steps[None, :] >= block_starts[:, None] - block_len
    return quadratic_attention(q, k_hat, v, bias, phi=phi, key_gradient=key_gradient)
