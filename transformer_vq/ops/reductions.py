"""The cache before each block: an exclusive prefix of `CacheStats` under `merge`.

The paper's three cross-block reductions (Codes 2-4) are three ways to compute it; they agree up to
rounding. `blocks` has a block axis, mean: [b, h, r, s, v]; `initial` is the cache before them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.errors import UserError
from transformer_vq.ops.cache import CacheStats, fraction, merge
from transformer_vq.ops.runtime import full_precision

REDUCTIONS = ("auto", "serial", "matmul", "associative", "input_scan")
BACKENDS = ("auto", "eager", "triton")


def check_method(reduction: str, backend: str) -> None:
    """Raise UserError if `vq_attention` does not have this reduction or backend."""
    if reduction == "triton":
        raise UserError("reduction='triton' is now backend='triton', with reduction='auto'")
    given = (("reduction", reduction, REDUCTIONS), ("backend", backend, BACKENDS))
    for name, value, known in given:
        if value not in known:
            raise UserError(f"{name}={value!r}: choose one of {', '.join(known)}")
    if backend == "triton" and reduction != "auto":
        raise UserError(f"backend='triton' needs reduction='auto', not {reduction!r}")


def exclusive_prefix(
    blocks: CacheStats, initial: CacheStats, reduction: str = "serial"
) -> tuple[CacheStats, CacheStats]:
    """Return the cache before each block, and the cache after the last one.

    Returns prefix with mean: [b, h, r, s, v] and total with mean: [b, h, s, v].
    """
    if blocks.count.shape[-2] == 1:
        first = CacheStats(initial.mean.unsqueeze(-3), initial.count.unsqueeze(-2))
        return first, merge(initial, blocks.blocks(0))
    if reduction == "serial":
        return _serial(blocks, initial)
    carry = None if blocks.carry is None else F.pad(blocks.carry, (1, 0), value=1)
    mean = torch.cat([initial.mean.unsqueeze(-3), blocks.mean], dim=-3)
    chain = CacheStats(mean, torch.cat([initial.count.unsqueeze(-2), blocks.count], dim=-2), carry)
    inclusive = _matmul(chain) if reduction == "matmul" else _associative(chain)
    return inclusive.blocks(slice(0, -1)), inclusive.blocks(-1)


def _serial(blocks: CacheStats, initial: CacheStats) -> tuple[CacheStats, CacheStats]:
    """Fold, block by block (Code 2)."""
    # unbind, because the gradient of indexing is a full tensor of zeros for every block
    means, counts = blocks.mean.unbind(-3), blocks.count.unbind(-2)
    carries = [None] * len(means) if blocks.carry is None else blocks.carry.unbind(-1)
    running = [initial]
    for block in map(CacheStats, means, counts, carries):
        running.append(merge(running[-1], block))
    prefix = CacheStats(
        torch.stack([stats.mean for stats in running[:-1]], dim=-3),
        torch.stack([stats.count for stats in running[:-1]], dim=-2),
    )
    return prefix, running[-1]


def _matmul(chain: CacheStats) -> CacheStats:
    """Multiply the means by a lower-triangular matrix of count fractions (Code 3).

    The closed form of all merges at once, and the only place besides `merge` that weights means.
    """
    n = chain.count.shape[-2]
    # reaches[r, g]: block g is part of the prefix that ends with block r
    reaches = chain.count.new_ones(n, n).tril()
    if chain.carry is not None:
        document = (1 - chain.carry).cumsum(-1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        reaches = (reaches * same).unsqueeze(-3)
    tokens = chain.count.transpose(-1, -2).unsqueeze(-2) * reaches  # [..., s, r, g]
    count = tokens.sum(-1)
    share = fraction(tokens, count.unsqueeze(-1), chain.mean.dtype)
    with full_precision(share.device):  # a mean in bfloat16 would not be a running mean
        mean = torch.einsum("...srg,...gsv->...rsv", share, chain.mean)
    return CacheStats(mean, count.transpose(-1, -2))


def _associative(chain: CacheStats) -> CacheStats:
    """Merge in a tree of depth log2(r) (Code 4): prefixes of pairs, then those in between."""
    n_blocks = chain.count.shape[-2]
    if n_blocks == 1:
        return chain
    pairs = merge(chain.blocks(slice(0, n_blocks - 1, 2)), chain.blocks(slice(1, None, 2)))
    odd = _associative(pairs)
    even = merge(odd.blocks(slice(0, (n_blocks - 1) // 2)), chain.blocks(slice(2, None, 2)))
    first = chain.blocks(slice(0, 1))
    return CacheStats(
        _interleave(torch.cat([first.mean, even.mean], dim=-3), odd.mean, dim=-3),
        _interleave(torch.cat([first.count, even.count], dim=-2), odd.count, dim=-2),
    )


def _interleave(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """Return even[0], odd[0], even[1], ... along a negative `dim`; `even` may be one longer."""
    n = odd.shape[dim]
    both = torch.stack([even.narrow(dim, 0, n), odd], dim=dim).flatten(dim - 1, dim)
    rest = even.narrow(dim, n, even.shape[dim] - n)
    return torch.cat([both, rest], dim=dim)
