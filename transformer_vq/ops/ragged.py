"""Rows that are not one sequence from end to end: padding, and several documents in a row.

Both come down to two facts. Every token knows where its document began (`doc_start`), and may look
back no further; and every row knows how many of its tokens count (`length`), the padding standing
last because `Packing.gather` puts it there. Masks follow by comparing indices, so shapes never
depend on the data, and the blocks, the window and the cache stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class Packing:
    """doc_start: [b, t] index of the first token of each token's document, counted from the first
    token of the segment (negative: before it). The rest is None where it is not needed:
    length: [b] tokens that count, order: [b, t] permutation that puts padding last,
    document: [b] id of the document in which each row ends.
    """

    doc_start: Tensor
    length: Tensor | None = None
    order: Tensor | None = None
    document: Tensor | None = None

    def part(self, start: int, stop: int) -> Packing:
        """The layout of tokens start to stop as a segment of their own."""
        length = None if self.length is None else (self.length - start).clamp(0, stop - start)
        return Packing(self.doc_start[:, start:stop] - start, length)

    @property
    def valid(self) -> Tensor | None:
        """Which tokens count, in the order of `gather`: [b, t]."""
        if self.length is None:
            return None
        steps = torch.arange(self.doc_start.shape[1], device=self.doc_start.device)
        return steps < self.length.unsqueeze(-1)

    @property
    def positions(self) -> Tensor:
        """How far into its document each token stands: [b, t]."""
        steps = torch.arange(self.doc_start.shape[1], device=self.doc_start.device)
        return steps - self.doc_start

    def last_start(self, position: Tensor) -> Tensor:
        """doc_start of the last token that counts; `position` is how long the row was before."""
        if self.length is None:
            return self.doc_start[:, -1]
        last = self.doc_start.gather(1, (self.length - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(self.length > 0, last, -position)

    def n_tokens(self) -> Tensor | int:
        """How many tokens of each row count."""
        return self.doc_start.shape[1] if self.length is None else self.length

    def gather(self, x: Tensor) -> Tensor:
        """Bring padding to the end of each row, and make it zero. x: [b, t, ...]."""
        if self.order is None or self.valid is None:
            return x
        valid = self.valid.view(*self.order.shape, *[1] * (x.ndim - 2))
        index = self.order.view(valid.shape).expand_as(x)
        return x.gather(1, index).masked_fill(~valid, 0)

    def scatter(self, y: Tensor) -> Tensor:
        """Undo `gather`; what belongs to padding is zero. y: [b, t, ...]."""
        if self.order is None or self.valid is None:
            return y
        valid = self.valid.view(*self.order.shape, *[1] * (y.ndim - 2))
        index = self.order.view(valid.shape).expand_as(y)
        return torch.zeros_like(y).scatter(1, index, y.masked_fill(~valid, 0))


@dataclass(frozen=True)
class Eviction:
    """Which tokens move from the window into the cache, and what becomes of the cache.

    counted: [b, r, i] tokens of the document in which their block ends; carry: [b, r] whether that
    document began before the block; goes_on: [b] whether the row's last document is in the cache.
    """

    counted: Tensor
    carry: Tensor
    goes_on: Tensor


def find_evictions(layout: Packing, position: Tensor, window_len: int, n_blocks: int) -> Eviction:
    """For a segment of n_blocks blocks: its first tokens follow those of the window."""
    seq_len = layout.doc_start.shape[1]
    n_query = seq_len // n_blocks
    begun = torch.cat([-position.unsqueeze(-1).expand(-1, window_len), layout.doc_start], dim=1)
    begun = begun[:, :seq_len]  # of the tokens at -window_len, -window_len + 1, ..., which leave
    steps = torch.arange(seq_len, device=begun.device)
    length = position.new_full(position.shape, seq_len) if layout.length is None else layout.length

    # A cache serves one document: that of the last token to leave with the block.
    first = steps[::n_query]  # [r]
    last = torch.minimum(first + n_query, length.unsqueeze(-1)) - 1
    begun_last = begun.gather(1, last.clamp(min=0))  # [b, r]
    counted = (begun <= steps - window_len) & (steps < length.unsqueeze(-1))
    counted = counted.unflatten(1, (n_blocks, n_query))
    counted = counted & (begun.unflatten(1, (n_blocks, n_query)) == begun_last.unsqueeze(-1))
    carry = (begun_last < first - window_len) | (last < first)
    goes_on = layout.last_start(position) < length - window_len
    return Eviction(counted, carry, goes_on)


@dataclass(frozen=True)
class Visibility:
    """What each query may see. local: [b, r, i, j] of window and block, cache: [b, r, i]."""

    local: Tensor
    cache: Tensor


def visible_keys(layout: Packing, window_len: int, n_blocks: int) -> Visibility:
    """Nothing before the query's own document."""
    doc_start = layout.doc_start.unflatten(1, (n_blocks, -1))
    n_query = doc_start.shape[-1]
    steps = torch.arange(window_len + n_query, device=doc_start.device)
    first = torch.arange(n_blocks, device=doc_start.device) * n_query - window_len
    keys = first.view(-1, 1, 1) + steps  # [r, 1, j]
    return Visibility(keys >= doc_start.unsqueeze(-1), doc_start < first.unsqueeze(-1))


def read_packing(
    state: AttentionState,
    seq_len: int,
    valid: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Packing | None:
    """The layout of the next segment, or None if it is plain: no padding, no documents.

    A document of which the state has seen the beginning goes on if the segment begins with its id.
    """
    if valid is None and document_ids is None:
        return None
    check_ragged(state, seq_len, valid, document_ids)
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
    if length is not None:  # padding goes on with the last document
        last = ids.gather(1, (length - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        last = torch.where(length > 0, last, first)
        ids = torch.where(steps < length.unsqueeze(-1), ids, last.unsqueeze(-1))
    chain = torch.cat([first.unsqueeze(-1), ids], dim=1)
    _check_documents(state, chain)
    changed = chain[:, 1:] != chain[:, :-1]
    doc_start = torch.where(changed, steps, before).cummax(dim=1).values
    return Packing(doc_start, length, order, document=last)


def check_ragged(
    state: AttentionState, seq_len: int, valid: Tensor | None, document_ids: Tensor | None
) -> None:
    """Refuse what is malformed, ambiguous or contradictory with one clear ValueError."""
    shape = (state.position.shape[0], seq_len)
    for name, x in (("valid", valid), ("document_ids", document_ids)):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, want {shape} as the tokens have")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}, want torch.bool: True where a token counts")
    if document_ids is None:
        return
    if document_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"document_ids are {document_ids.dtype}, want whole numbers (torch.int64)")


def _check_documents(state: AttentionState, ids: Tensor) -> None:
    """Look at the values; not when compiling, where that would break the graph.

    ids: [b, 1 + t], the document before the segment and then those of its tokens.
    """
    if torch.compiler.is_compiling() or ids.is_meta:
        return
    has_past = state.position > 0
    if state.document is None and has_past.any():
        raise ValueError(
            "the state has seen tokens without document_ids, so it is not known whether its "
            "document goes on; give document_ids from the start, or begin anew with state.reset"
        )
    before = torch.where(has_past, ids[:, 0], ids[:, 1])  # an empty row has no document yet
    ids = torch.cat([before.unsqueeze(-1), ids[:, 1:]], dim=1)
    if (ids < 0).any():
        raise ValueError("document_ids must not be negative; mark padding by valid=False instead")
    ordered = ids.sort(dim=1).values
    n_documents = (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    n_changes = (ids[:, 1:] != ids[:, :-1]).sum(1)
    if (n_documents != n_changes).any():
        row = int((n_documents != n_changes).nonzero()[0])
        raise ValueError(
            f"a document id comes back in row {row} after another document; a document is one "
            "stretch of tokens, give each an id of its own"
        )


def document_ids_from_starts(starts: Tensor, document: Tensor | None = None) -> Tensor:
    """Document ids for rows given by where documents start. starts: [b, t] of bool.

    document: [b], `state.document` of the segment before, which goes on until the first start.
    """
    ids = starts.cumsum(dim=1)
    return ids if document is None else ids + document.unsqueeze(-1)


def next_position(position: Tensor, seq_len: int, layout: Packing | None) -> Tensor:
    """How far into its document each row stands after the segment: [b]."""
    if layout is None:
        return position + seq_len
    return layout.n_tokens() - layout.last_start(position)


def newest(window: Tensor, segment: Tensor, n: int, length: Tensor | None, dim: int) -> Tensor:
    """The n newest tokens of window and segment, of which `length` tokens per row count.

    window: [b, h, w] or [b, h, w, x], segment alike; dim: the axis of tokens, negative.
    """
    window = window.to(segment.dtype)
    seq_len = segment.shape[dim]
    if length is None:
        if seq_len >= n:
            # A copy: a view would keep the whole segment in memory for as long as the state lives.
            return segment.narrow(dim, seq_len - n, n).clone()
        n_kept = n - seq_len
        return torch.cat([window.narrow(dim, window.shape[dim] - n_kept, n_kept), segment], dim=dim)
    both = torch.cat([window, segment], dim=dim)
    last = window.shape[dim] + length.view(-1, 1, *[1] * -dim)
    index = last - n + torch.arange(n, device=both.device).view(-1, *[1] * (-dim - 1))
    shape = (*both.shape[:2], n, *both.shape[3:])
    return both.gather(dim, index.clamp(min=0).expand(shape))
