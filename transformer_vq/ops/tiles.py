"""Tiles of queries for the fused attention, and their scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_vq.ops.cache import accumulation_dtype


@dataclass(frozen=True)
class Blocks:
    """Everything that has no gradient. B is b * h, n counts blocks, i the queries of a block.

    codebook: [B, s, k], count: [B, s] (s = 0 without a cache), codes: [B, n, i] of the tokens
    evicted with a block, counted: [B, n, i] False for those that do not count, window_valid:
    [B, L]. For documents also carry: [B, n], 0 where the cache starts over, and doc_start: [b, t],
    as in `Packing`. Masks are derived from it tile by tile: kept, they would be far larger.
    """

    n_blocks: int
    n_empty: int
    """Number of first blocks with an empty cache; the first of them also has an empty window."""
    grad_through_cache: bool
    keep: bool
    tile_queries: int | None
    """Queries per tile; None for a whole block."""
    codebook: Tensor
    count: Tensor
    codes: Tensor
    window_valid: Tensor
    counted: Tensor
    carry: Tensor | None
    doc_start: Tensor | None

    def n_code(self, block: int) -> int:
        """Return the number of score columns for the cache."""
        return 0 if block < self.n_empty else self.count.shape[-1]

    def first_key(self, block: int, window_len: int) -> int:
        """Return the index of the first visible key in the previous block and the block itself."""
        return window_len if block == 0 and self.n_empty > 0 else 0

    def rows(self, block: int) -> Tensor:
        """Return the rows in the flattened cache, [B * s, ...], of the evicted tokens: [B, i]."""
        n_heads, n_code = self.count.shape
        first = n_code * torch.arange(n_heads, device=self.codes.device).unsqueeze(-1)
        return self.codes[:, block] + first

    def has_uncounted(self, block: int) -> bool:
        """Return whether evicted tokens may not count: empty slots, other documents."""
        return block == 0 or self.carry is not None


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of a block, which attend to n_local keys of the window and the block."""

    block: int
    first: int
    """Index of the first query in its block."""
    queries: slice
    """Indices of the queries in the segment."""
    n_group: int
    window_len: int

    @property
    def n_rows(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def n_local(self) -> int:
        return self.window_len + self.first + self.n_rows

    def by_distance(self, scores: Tensor, n_code: int) -> Tensor:
        """Return a view of the scores by distance L, ..., 0: [B, g, rows, L + 1].

        Query i of a block is at distance L from key i of the window and the block, so each row
        starts one key later than the previous one.
        """
        n_keys = scores.shape[-1]
        return scores.as_strided(
            (scores.shape[0], self.n_group, self.n_rows, self.window_len + 1),
            (scores.stride(0), self.n_rows * n_keys, n_keys + 1, 1),
            scores.storage_offset() + n_code + self.first,
        )


def tiles(q: Tensor, window: Tensor, block: int, n_queries: int | None) -> list[Tile]:
    """Return the tiles of a block, of n_queries each; None for a single tile."""
    _, n_group, seq_len, _ = q.shape
    window_len = window.shape[1]
    start, stop = block * window_len, min((block + 1) * window_len, seq_len)
    rows = window_len if n_queries is None else n_queries
    return [
        Tile(block, i - start, slice(i, min(i + rows, stop)), n_group, window_len)
        for i in range(start, stop, rows)
    ]


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b: [B, i, j] and [B, j, k] -> [B, i, k].

    A batch of one is a matrix product: in bf16 on a CPU, `bmm` copies transposed operands.
    """
    if a.shape[0] > 1:
        return torch.bmm(a, b, out=out)
    return torch.mm(a[0], b[0], out=None if out is None else out[0]).unsqueeze(0)


def tile_scores(
    tile: Tile,
    q: Tensor,
    k_local: Tensor,
    by_distance: Tensor | None,
    count: Tensor,
    blocks: Blocks,
) -> Tensor:
    """Return scores of cache, window and block, up to the last query's own key.

    [B, g * rows, keys], -inf for keys that a query must not attend to.
    """
    n_code, window_len = blocks.n_code(tile.block), tile.window_len
    q = q[:, :, tile.queries].flatten(1, 2)
    scores = q.new_empty(*q.shape[:2], n_code + tile.n_local)
    first_key = blocks.first_key(tile.block, window_len)
    # Columns before first_key stay uninitialized; they are masked below.
    local = scores[..., n_code + first_key :]
    product(q, k_local[:, first_key : tile.n_local].mT, out=local)
    if n_code > 0:
        product(q, blocks.codebook.mT, out=scores[..., :n_code])
    scores = scores.to(accumulation_dtype(scores.dtype))
    if by_distance is not None:
        tile.by_distance(scores, n_code).add_(by_distance[:, :, tile.queries])

    by_query = scores.view(q.shape[0], tile.n_group, tile.n_rows, -1)
    future = torch.ones(tile.n_rows, tile.n_rows, dtype=torch.bool, device=q.device).triu(1)
    by_query[..., -tile.n_rows :].masked_fill_(future, -torch.inf)
    if n_code > 0:
        log_count = count.clamp(min=1).to(scores.dtype).log()
        scores[..., :n_code] += torch.where(count > 0, log_count, -torch.inf).unsqueeze(1)
    if count.shape[-1] == 0:  # without a cache, attention ends at distance L
        far = torch.ones(tile.n_rows, window_len, dtype=torch.bool, device=q.device)
        by_query[..., :window_len].masked_fill_(far.tril(tile.first - 1), -torch.inf)
    if tile.block == 0:
        empty = ~blocks.window_valid[:, None, None]
        by_query[..., n_code : n_code + window_len].masked_fill_(empty, -torch.inf)
    if blocks.doc_start is not None:
        by_row = by_query.unflatten(0, (len(blocks.doc_start), -1))  # [b, h, g, rows, keys]
        start = blocks.doc_start[:, None, None, tile.queries, None]
        first = tile.block * window_len - window_len
        keys = first + torch.arange(tile.n_local, device=q.device)
        by_row[..., n_code:].masked_fill_(keys < start, -torch.inf)
        by_row[..., :n_code].masked_fill_(first <= start, -torch.inf)
    return scores
