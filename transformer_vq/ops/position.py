"""Positions: sinusoids, Transformer-XL scores by distance, and the local bias.

The positional part of a score depends only on the query and the distance i - j. It is computed once
per (query, distance), as `by_distance`, farthest first. Viewing the same memory with rows one
element shorter shears it into the (query, key) form of a bias.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops.cache import accumulation_dtype


def sinusoids(positions: Tensor, width: int, wavelength: float, dtype: torch.dtype) -> Tensor:
    """Return the sine half, then the cosine half. positions: [...] -> [..., width]."""
    exact = accumulation_dtype(dtype)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=exact) / width
    angles = positions.unsqueeze(-1).to(exact) * wavelength**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def scores_of_few_queries(q: Tensor, r_weight: Tensor, table: Tensor) -> Tensor:
    """Return q . r_d for r_d = r_weight table_d; cheaper for few queries (decoding).

    q: [b, h, g, i, k], r_weight: [h, k, w], table: [d, w] -> [b, h, g, i, d]. The product is
    associative: this projects the queries to the width of the sinusoids, not the other way round.
    """
    wide = torch.einsum("bhgik,hkw->bhgiw", q, r_weight)
    return torch.einsum("bhgiw,dw->bhgid", wide, table)


def with_few_queries(q: Tensor, table: Tensor) -> bool:
    """Return whether `scores_of_few_queries` is the cheaper form."""
    (n_distances, width), d_k = table.shape, q.shape[-1]
    n_queries = q.shape[0] * q.shape[2] * q.shape[3]
    cost_keys = n_distances * width * d_k + n_queries * n_distances * d_k
    return n_queries * (d_k * width + n_distances * width) < cost_keys


def local_bias(by_distance: Tensor, older: float = 0.0) -> Tensor:
    """Return the bias of a block of queries for the window before it and the block itself.

    by_distance: [..., i, L + 1] for distances L, ..., 0 -> [..., i, L + i]; key j is at distance
    i + L - j. Keys further than L get `older`, keys in the future -inf.
    """
    n_query, n_key = by_distance.shape[-2], by_distance.shape[-1] - 1 + by_distance.shape[-2]
    # Row i of the result is row i of by_distance shifted right by i: it is followed in memory by
    # its own future keys, then by the far keys of the next row.
    column = torch.arange(n_query, device=by_distance.device)
    is_future = column < n_query - 1 - column.unsqueeze(-1)
    filler = torch.where(is_future, -torch.inf, older).to(by_distance.dtype)
    filler = filler.expand(*by_distance.shape[:-2], n_query, n_query)
    rows = torch.cat([by_distance, filler], dim=-1)  # one longer than a row of the result
    bias: Tensor = rows.flatten(-2)[..., : n_query * n_key].unflatten(-1, (n_query, n_key))
    return bias


def causal_bias(by_distance: Tensor) -> Tensor:
    """Return the bias of the last i of n tokens, as queries, for all n keys.

    by_distance: [..., i, n] for distances n - 1, ..., 0 -> [..., i, n], future keys -inf.
    """
    if torch.compiler.is_compiling():  # the compiler decides what to copy
        n_query, n_key = by_distance.shape[-2:]
        flat = F.pad(by_distance, (1, 0)).flatten(-2)[..., n_query:]
        rows: Tensor = flat.unflatten(-1, (n_query, n_key))
        return rows.masked_fill(future_mask(n_query, n_key, by_distance.device), -torch.inf)
    bias: Tensor = _CausalBias.apply(by_distance)  # type: ignore[no-untyped-call]
    return bias


class _CausalBias(torch.autograd.Function):
    """Shift row i left by n_query - 1 - i; what wraps around is in the future and masked.

    A custom function copies these large matrices once, not in every operation and its gradient.
    """

    @staticmethod
    def forward(ctx: Any, by_distance: Tensor) -> Tensor:
        n_query, n_key = by_distance.shape[-2:]
        x = by_distance.contiguous()
        strides = (*x.stride()[:-2], n_key - 1, 1)
        moved = x.as_strided(x.shape, strides, x.storage_offset() + n_query - 1)
        return moved.masked_fill(future_mask(n_query, n_key, x.device), -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        n_query, n_key = grad.shape[-2:]
        grad = grad.contiguous()
        d_by_distance = torch.empty_like(grad)
        d_by_distance[..., 0, n_query - 1 :] = grad[..., 0, : n_key - n_query + 1]
        rest = d_by_distance[..., 1:, :]
        strides = (*grad.stride()[:-2], n_key + 1, 1)
        start = grad.storage_offset() + n_key - n_query + 2
        rest.copy_(grad.as_strided(rest.shape, strides, start))
        steps = torch.arange(n_key, device=grad.device)
        before_start = steps < steps[:n_query].flip(0).unsqueeze(-1)
        return d_by_distance.masked_fill_(before_start, 0.0)


def future_mask(n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
    """Return True where the key is after the query; queries are the last n_query tokens."""
    steps = torch.arange(n_key, device=device)
    return steps > steps[n_key - n_query :].unsqueeze(-1)
