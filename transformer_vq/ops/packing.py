"""Segments: the inputs of the attention as one value, where a sequence is cut, and packing.

Packing means padding and several documents in one row. Two numbers describe both. `doc_start` is
the index at which the document of each token starts; a token attends to nothing before it. `length`
is the number of valid tokens of each row; padding is last, because `Packing.gather` moves it there.
All masks follow by comparing indices, so shapes never depend on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_vq.ops.runtime import check_values
from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class Packing:
    """doc_start: [b, t] index of the first token of each token's document, relative to the first
    token of the segment (negative: before it). The others are None where they are not needed:
    length: [b] number of valid tokens, order: [b, t] permutation that moves padding to the end,
    document: [b] id of the last document of each row.
    """

    doc_start: Tensor
    length: Tensor | None = None
    order: Tensor | None = None
    document: Tensor | None = None

    def split(self, lens: Sequence[int]) -> list[Packing]:
        """Return the packing of consecutive segments with these lengths."""
        if len(lens) == 1:
            return [self]
        segments, start = [], 0
        for n, doc_start in zip(lens, self.doc_start.split(list(lens), dim=1), strict=True):
            length = None if self.length is None else (self.length - start).clamp(0, n)
            segments.append(Packing(doc_start - start, length))
            start += n
        return segments

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are not padding, in the order of `gather`: [b, t]."""
        if self.length is None:
            return None
        steps = torch.arange(self.doc_start.shape[1], device=self.doc_start.device)
        return steps < self.length.unsqueeze(-1)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document: [b, t]."""
        steps = torch.arange(self.doc_start.shape[1], device=self.doc_start.device)
        return steps - self.doc_start

    def last_start(self, position: Tensor) -> Tensor:
        """Return doc_start of the last valid token; position: [b] before the segment."""
        if self.length is None:
            return self.doc_start[:, -1]
        last = self.doc_start.gather(1, (self.length - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(self.length > 0, last, -position)

    def gather(self, x: Tensor) -> Tensor:
        """Move padding to the end of each row and set it to zero. x: [b, t, ...]."""
        if self.order is None or self.valid is None:
            return x
        shape = (*self.order.shape, *[1] * (x.ndim - 2))
        index = self.order.view(shape).expand_as(x)
        return x.gather(1, index).masked_fill(~self.valid.view(shape), 0)

    def scatter(self, y: Tensor) -> Tensor:
        """Undo `gather`; padding gets zeros. y: [b, t, ...]."""
        if self.order is None or self.valid is None:
            return y
        shape = (*self.order.shape, *[1] * (y.ndim - 2))
        index = self.order.view(shape).expand_as(y)
        return torch.zeros_like(y).scatter(1, index, y.masked_fill(~self.valid.view(shape), 0))


@dataclass(frozen=True)
class Eviction:
    """Which tokens move from the window to the cache with each block.

    counted: [b, r, i], False for empty slots, padding and tokens of other documents than the one
    the block ends in. With documents also carry: [b, r], 1 if that document started before the
    block, so that the cache before it counts, and kept: [b], 1 if the last document of the row has
    tokens in the cache.
    """

    counted: Tensor
    carry: Tensor | None = None
    kept: Tensor | None = None


def find_evictions(
    state: AttentionState, packing: Packing | None, seq_len: int, n_blocks: int
) -> Eviction:
    """Return the evictions of a segment of n_blocks blocks: its first tokens follow the window."""
    window_len, n_query = state.k.shape[-2], seq_len // n_blocks
    if packing is None:
        later = state.window_valid.new_ones(state.position.shape[0], seq_len)
        counted = torch.cat([state.window_valid, later], dim=-1)[:, :seq_len]
        return Eviction(counted.unflatten(-1, (n_blocks, n_query)))

    position = state.position
    starts = torch.cat([-position.unsqueeze(-1).expand(-1, window_len), packing.doc_start], dim=1)
    starts = starts[:, :seq_len]  # of the evicted tokens, at -window_len, -window_len + 1, ...
    steps = torch.arange(seq_len, device=starts.device)
    length = packing.length
    if length is None:
        length = position.new_full(position.shape, seq_len)

    # A cache holds one document: that of the last token evicted with the block.
    first = torch.arange(n_blocks, device=starts.device) * n_query  # [r]
    last = torch.minimum(first + n_query, length.unsqueeze(-1)) - 1
    start_of_last = starts.gather(1, last.clamp(min=0))  # [b, r]
    counted = (starts <= steps - window_len) & (steps < length.unsqueeze(-1))
    counted = counted.unflatten(1, (n_blocks, n_query))
    same = starts.unflatten(1, (n_blocks, n_query)) == start_of_last.unsqueeze(-1)
    carry = (start_of_last < first - window_len) | (last < first)
    kept = packing.last_start(position) < length - window_len
    return Eviction(counted & same, carry.to(torch.int64), kept.to(torch.int64))


def visible_keys(packing: Packing, window_len: int, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Return what queries may attend to: nothing before their own document.

    Returns local: [b, r, i, j] of window and block, and cache: [b, r, i].
    """
    doc_start = packing.doc_start.unflatten(1, (n_blocks, -1))
    n_query = doc_start.shape[-1]
    steps = torch.arange(window_len + n_query, device=doc_start.device)
    first = torch.arange(n_blocks, device=doc_start.device) * n_query - window_len
    keys = first.view(-1, 1, 1) + steps  # [r, 1, j]
    return keys >= doc_start.unsqueeze(-1), doc_start < first.unsqueeze(-1)


def read_packing(
    state: AttentionState,
    seq_len: int,
    valid: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Packing | None:
    """Return the packing of the next segment, or None without padding and documents.

    The current document of the state continues if the segment starts with its id.
    """
    if valid is None and document_ids is None:
        return None
    _check_arguments((state.position.shape[0], seq_len), valid, document_ids)
    order = length = None
    if valid is not None:
        order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)
        length = valid.sum(dim=1)
    before = -state.position.unsqueeze(-1)
    if document_ids is None:
        return Packing(before.expand(-1, seq_len), length, order, state.document)

    steps = torch.arange(seq_len, device=document_ids.device)
    ids = Packing(before.expand(-1, seq_len), length, order).gather(document_ids)
    first = ids[:, 0] if state.document is None else state.document
    last = ids[:, -1]
    if length is not None:  # padding continues the last document
        last = ids.gather(1, (length - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        last = torch.where(length > 0, last, first)
        ids = torch.where(steps < length.unsqueeze(-1), ids, last.unsqueeze(-1))
    chain = torch.cat([first.unsqueeze(-1), ids], dim=1)
    _check_documents(state, chain)
    changed = chain[:, 1:] != chain[:, :-1]
    doc_start = torch.where(changed, steps, before).cummax(dim=1).values
    return Packing(doc_start, length, order, document=last)


def _check_arguments(shape: tuple[int, int], valid: Tensor | None, ids: Tensor | None) -> None:
    """Raise ValueError if valid or document_ids have the wrong shape or type."""
    for name, x in (("valid", valid), ("document_ids", ids)):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, want {shape} like the tokens")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}, want torch.bool: False for padding")
    if ids is not None and ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"document_ids are {ids.dtype}, want integers (torch.int64)")


def _check_documents(state: AttentionState, ids: Tensor) -> None:
    """Check the values, where that is possible.

    ids: [b, 1 + t], the document before the segment and then those of its tokens.
    """

    def check(ok: Tensor, message: str) -> None:
        check_values(ok, message, lambda: ValueError(message))

    if torch.compiler.is_compiling():
        return
    has_past = state.position > 0
    if state.document is None:
        problem = "the state has tokens without ids: it is unknown whether its document continues"
        fix = "pass document_ids from the start, or start over with state.reset"
        check(~has_past, f"{problem}; {fix}")
    before = torch.where(has_past, ids[:, 0], ids[:, 1])  # an empty row has no document yet
    ids = torch.cat([before.unsqueeze(-1), ids[:, 1:]], dim=1)
    check(ids >= 0, "document_ids must not be negative; mark padding by valid=False instead")
    ordered = ids.sort(dim=1).values
    n_documents = (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    contiguous = n_documents == (ids[:, 1:] != ids[:, :-1]).sum(1)  # as many as changes

    def error() -> ValueError:
        row = int((~contiguous).nonzero()[0])
        problem = f"a document id reappears in row {row} after another document"
        fix = "the tokens of a document must be consecutive, use a new id for each document"
        return ValueError(f"{problem}; {fix}")

    check_values(contiguous, "a document id reappears after another document", error)


def document_ids_from_starts(starts: Tensor, document: Tensor | None = None) -> Tensor:
    """Return document ids for rows given by start flags. starts: [b, t] of bool.

    document: [b], `state.document` of the previous segment; it continues until the first start.
    """
    ids = starts.cumsum(dim=1)
    return ids if document is None else ids + document.unsqueeze(-1)


def next_position(position: Tensor, seq_len: int, packing: Packing | None) -> Tensor:
    """Return the position of each row in its document after the segment: [b]."""
    if packing is None:
        return position + seq_len
    n_tokens = seq_len if packing.length is None else packing.length
    return n_tokens - packing.last_start(position)


def newest(window: Tensor, segment: Tensor, n: int, length: Tensor | None, dim: int) -> Tensor:
    """Return the n newest tokens of window and segment, of which `length` per row are valid.

    window: [b, h, w] or [b, h, w, x], segment alike; dim: the axis of tokens, negative.
    """
    window = window.to(segment.dtype)
    seq_len = segment.shape[dim]
    if length is None:
        if seq_len >= n:
            # A copy: a view would keep the segment in memory as long as the state exists.
            return segment.narrow(dim, seq_len - n, n).clone()
        n_kept = n - seq_len
        return torch.cat([window.narrow(dim, window.shape[dim] - n_kept, n_kept), segment], dim=dim)
    both = torch.cat([window, segment], dim=dim)
    last = window.shape[dim] + length.view(-1, 1, *[1] * -dim)
    index = last - n + torch.arange(n, device=both.device).view(-1, *[1] * (-dim - 1))
    shape = (*both.shape[:2], n, *both.shape[3:])
    return both.gather(dim, index.clamp(min=0).expand(shape))


def segment_lens(seq_len: int, block_len: int, max_len: int) -> list[int]:
    """Cut a sequence: into segments of at most max_len tokens, in whole blocks, then the rest.

    Only the last segment may be shorter than a block. max_len is rounded down to whole blocks.
    """
    segment_len = max(max_len // block_len, 1) * block_len
    n_whole = seq_len // block_len * block_len
    lens = [min(segment_len, n_whole - start) for start in range(0, n_whole, segment_len)]
    return lens + [seq_len - n_whole] * (seq_len > n_whole)


def split(x: Tensor, lens: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Split a tensor; unlike that of slices, the gradient is put together only once."""
    return (x,) if len(lens) == 1 else x.split(list(lens), dim)


def shift_in(window: Tensor, segment: Tensor, n_blocks: int, dim: int) -> Tensor:
    """Return the window, then all blocks of the segment but the last."""
    window = window.to(segment.dtype)
    if n_blocks == 1:
        return window
    kept = segment.narrow(dim, 0, segment.shape[dim] - window.shape[dim])
    return torch.cat([window, kept], dim=dim)


@dataclass(frozen=True)
class AttentionInputs:
    """One segment of a sequence, projected and quantized.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] positional scores for distances L, ..., 0, or None for none;
    packing: padding and documents. After `blocked`, t is replaced by two axes: r, i.
    """

    q: Tensor
    k_hat: Tensor
    z: Tensor
    v: Tensor
    codebook: Tensor
    by_distance: Tensor | None = None
    packing: Packing | None = None

    @property
    def seq_len(self) -> int:
        return self.q.shape[-2]

    def _map(self, fn: Callable[[Tensor, int], Tensor]) -> AttentionInputs:
        """Apply fn(x, dim) to all tensors with an axis of tokens, dim, which is negative."""
        bias = None if self.by_distance is None else fn(self.by_distance, -2)
        q, k_hat, v = (fn(x, -2) for x in (self.q, self.k_hat, self.v))
        return replace(self, q=q, k_hat=k_hat, z=fn(self.z, -1), v=v, by_distance=bias)

    def split(self, lens: Sequence[int]) -> list[AttentionInputs]:
        """Return consecutive segments with these lengths."""
        if len(lens) == 1:
            return [self]
        packings = [None] * len(lens) if self.packing is None else self.packing.split(lens)
        segments, start = [], 0
        for n, packing in zip(lens, packings, strict=True):
            segment = self._map(lambda x, dim, at=start, n=n: x.narrow(dim, at, n))  # type: ignore[misc]
            segments.append(replace(segment, packing=packing))
            start += n
        return segments

    def blocked(self, n_blocks: int) -> AttentionInputs:
        """Return a view in which the axis of tokens is divided into n_blocks blocks."""
        return self._map(lambda x, dim: x.unflatten(dim, (n_blocks, -1)))
