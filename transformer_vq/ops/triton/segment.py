"""What the kernels for one segment share; B = b * h."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Everything that has no gradient.

    codebook: [h, s, k], count: [B, s] before the segment (s = 0 without a cache), codes:
    [B, r, L] of the previous blocks, counted: [b, r, i] of uint8, carry: [b, r] for documents,
    start: [b, t], before which a query attends to nothing. The cache before `start` is masked only
    with has_documents; without, its counts decide.
    """

    n_blocks: int
    n_query: int
    n_head: int
    codebook: Tensor
    count: Tensor
    codes: Tensor
    counted: Tensor
    carry: Tensor | None
    start: Tensor
    has_documents: bool
    grad_through_cache: bool

    @property
    def n_code(self) -> int:
        return self.count.shape[-1]

    @property
    def window_len(self) -> int:
        return self.codes.shape[-1]


@dataclass(frozen=True)
class Prefix:
    """means: [B, r, s, v] before each block, counts: [B, r + 1, s], after: [B, s, v] mean."""

    means: Tensor
    counts: Tensor
    after: Tensor
