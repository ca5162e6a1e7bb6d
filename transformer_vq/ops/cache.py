"""The compressive cache: mean value and number of tokens per code.

Together with `merge` these statistics form a monoid (identity: `CacheStats.empty`). Every form of
the attention brackets the same merges differently: a fold, a tree, a closed form, one token at a
time. Means instead of sums keep the values of order one for streams of any length (Remark 3.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_vq.ops.runtime import tensor_tree


@tensor_tree
@dataclass(frozen=True)
class CacheStats:
    """mean: [..., s, v] in `accumulation_dtype`, count: [..., s] of int64.

    Counts are integers because float32 stops counting at 2^24. carry: [...] of int64, 0 where these
    tokens start a new document, so that earlier ones do not count; None means 1 everywhere. The
    mean of a code with count 0 is arbitrary.
    """

    mean: Tensor
    count: Tensor
    carry: Tensor | None = None

    @classmethod
    def empty(
        cls, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> CacheStats:
        """Return the identity of `merge`; `shape` is that of the mean, [..., s, v]."""
        return cls(
            torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device),
            torch.zeros(shape[:-1], dtype=torch.int64, device=device),
        )

    def blocks(self, index: int | slice) -> CacheStats:
        """Return the statistics of one block or a slice of blocks, for mean: [..., r, s, v]."""
        carry = None if self.carry is None else self.carry[..., index]
        return CacheStats(self.mean[..., index, :, :], self.count[..., index, :], carry)

    def detach(self) -> CacheStats:
        return CacheStats(self.mean.detach(), self.count, self.carry)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64: a bfloat16 count would stop growing at 256."""
    return torch.promote_types(dtype, torch.float32)


def merge(a: CacheStats, b: CacheStats) -> CacheStats:
    """Return the statistics of both token sets: the count-weighted mean. Associative."""
    before, carry = a.count, b.carry
    if b.carry is not None:
        before = a.count * b.carry.unsqueeze(-1)
        carry = b.carry if a.carry is None else a.carry * b.carry
    count = before + b.count
    share = fraction(b.count, count, a.mean.dtype)
    return CacheStats(torch.lerp(a.mean, b.mean, share.unsqueeze(-1)), count, carry)


def fraction(part: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return part / total as a floating-point number; 0 where the total is 0."""
    return part.to(dtype) / total.clamp(min=1).to(dtype)


def lookup(codebook: Tensor, z: Tensor) -> Tensor:
    """Return the codewords of the codes. codebook: [h, s, k], z: [b, h, ...] -> [b, h, ..., k]."""
    n_head, n_code, _ = codebook.shape
    first = n_code * torch.arange(n_head, device=z.device)
    return codebook.flatten(0, 1)[z + first.view(-1, *[1] * (z.ndim - 2))]


def code_sums(
    z: Tensor, x: Tensor, n_code: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `x` and the number of tokens per code: Delta x, Delta 1 without Delta.

    z: [..., t], x: [..., t, w], valid: broadcastable to z; tokens where it is False are ignored.
    Returns sum: [..., s, w], count: [..., s].
    """
    dtype = accumulation_dtype(x.dtype)
    x = x.to(dtype)
    weight = torch.ones((), dtype=dtype, device=x.device).expand(z.shape)
    if valid is not None:
        weight = valid.to(dtype).expand(z.shape)
        x = x * weight.unsqueeze(-1)
    # A flat table with a row for every (leading index, code) needs a single index_add.
    lead, n_rows = z.shape[:-1], z.shape[:-1].numel() * n_code
    offsets = torch.arange(0, n_rows, n_code, device=z.device).view(*lead, 1)
    rows = (z + offsets).flatten()
    totals = x.new_zeros(n_rows, x.shape[-1]).index_add_(0, rows, x.reshape(-1, x.shape[-1]))
    counts = x.new_zeros(n_rows).index_add_(0, rows, weight.flatten())
    return totals.view(*lead, n_code, -1), counts.view(*lead, n_code)


def block_stats(z: Tensor, v: Tensor, n_code: int, valid: Tensor | None = None) -> CacheStats:
    """Return the cache statistics of the given tokens. z: [..., t], v: [..., t, v]."""
    total, count = code_sums(z, v, n_code, valid)
    # In place, because the sums are new and this table dominates the cost of a merge.
    return CacheStats(total.div_(count.clamp(min=1).unsqueeze(-1)), count.to(torch.int64))
