"""Evaluation: bits per byte, word-level perplexity, loss by position in context.

There are two protocols. `windowed` is the paper's: the split is cut into sequences of T tokens,
each with a fresh state. `streaming` carries the state through whole documents of any length, which
a model with constant cost per token can afford.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.data.batches import Batch, packs_documents, read_positions, read_rows
from transformer_vq.data.corpus import Split
from transformer_vq.device import evaluating, matmul_precision, to_device
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import NotFiniteError

Protocol = Literal["windowed", "streaming"]
N_BINS = 40  # position p falls into bin floor(log2(p + 1)): enough for any document


@dataclass(frozen=True)
class PositionBin:
    """Mean loss of the tokens with `first` to `last` tokens of context before them."""

    first: int
    last: int
    tokens: int
    nats_per_token: float


@dataclass(frozen=True)
class Evaluation:
    """Totals of an evaluation, and the metrics derived from them."""

    protocol: Protocol
    nats: float
    tokens: int
    bytes: int
    words: int | None
    by_position: tuple[PositionBin, ...]

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats per word of the original text); infinite if it overflows."""
        if not self.words:
            return None
        per_word = self.nats / self.words
        return math.exp(per_word) if per_word < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("protocol", "bits_per_byte", "nats_per_token", "word_perplexity")
        found = {x: getattr(self, x) for x in (*names, "tokens", "bytes", "words")}
        if self.word_perplexity == math.inf:
            found["word_perplexity"] = None
        return found | {"by_position": [vars(x) for x in self.by_position]}


def score(
    model: TransformerVQ,
    split: Split,
    protocol: Protocol = "windowed",
    *,
    seq_len: int,
    span: int = 2048,
    batch_size: int = 8,
    precision: str = "fp32",
    max_tokens: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
    stopped: Callable[[], bool] = lambda: False,
    share: tuple[int, int] = (0, 1),
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> Evaluation | None:
    """Score every token of the split once, with the context that the protocol allows.

    seq_len: T of the windowed protocol. span, batch_size: tokens and rows per forward pass; they
    change memory and speed, not the result. max_tokens: score only the start of the split; bytes
    and words are then scaled in proportion. Return None if `stopped` returns True. share: (rank,
    number of ranks) that split the contexts; `total` sums over them. Raise NotFiniteError for NaN.
    """
    sizes = {"seq_len": seq_len, "span": span, "batch_size": batch_size, "max_tokens": max_tokens}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{name}={size}: must be at least 1")
    device = next(model.parameters()).device
    nats = torch.zeros(N_BINS, dtype=torch.float64, device=device)
    count = torch.zeros(N_BINS, dtype=torch.int64, device=device)
    with evaluating(model), matmul_precision(device, precision):
        state = None
        contexts = _contexts(split, protocol, seq_len, max_tokens)
        for is_first, positions, batch in _spans(split, contexts, batch_size, span, share):
            if stopped():
                return None
            if is_first:
                state = None
            elif state is not None and len(positions) < len(state.position):
                state = state.select(torch.arange(len(positions), device=device))
            n_targets = batch.n_targets
            batch = batch.map(lambda x: to_device(x, device))
            output = model(batch.tokens, state, batch.valid, batch.document_ids)
            state = output.state
            losses = F.cross_entropy(
                output.logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
            )
            valid = batch.valid
            weight = torch.ones_like(batch.targets) if valid is None else valid.long()
            bins = position_bin(to_device(positions, device)).flatten()
            nats.index_add_(0, bins, losses.double() * weight.flatten())
            count.index_add_(0, bins, weight.flatten())
            advance(n_targets)
    nats_of, tokens_of = total(nats).tolist(), total(count).tolist()
    if math.isnan(sum(nats_of)):
        raise NotFiniteError("the loss is NaN; the weights or the codebooks are not finite")
    by_position = tuple(
        PositionBin(2**i - 1, 2 ** (i + 1) - 2, n, loss / n)
        for i, (n, loss) in enumerate(zip(tokens_of, nats_of, strict=True))
        if n
    )
    n_tokens, whole = sum(tokens_of), split.size
    n_bytes = round(whole.bytes * (n_tokens / whole.tokens))
    words = None if whole.words is None else round(whole.words * (n_tokens / whole.tokens))
    return Evaluation(protocol, sum(nats_of), n_tokens, n_bytes, words, by_position)


def position_bin(positions: Tensor) -> Tensor:
    """Return floor(log2(p + 1)) from the exponent: a logarithm may round across a power of two."""
    return (positions + 1).double().frexp().exponent.long() - 1


def _contexts(
    split: Split, protocol: Protocol, seq_len: int, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return starts and ends of contexts, longest first, and whether one spans documents."""
    size = len(split) if max_tokens is None else min(max_tokens, len(split))
    is_windowed = protocol == "windowed"
    starts = np.asarray(split.starts)
    begins = np.arange(0, size, seq_len) if is_windowed else starts[starts < size]
    ends = np.append(begins[1:], size)
    order = np.argsort(begins - ends, kind="stable")
    return begins[order], ends[order], is_windowed and packs_documents(split, seq_len)


def _spans(
    split: Split,
    contexts: tuple[np.ndarray, np.ndarray, bool],
    batch_size: int,
    span: int,
    share: tuple[int, int],
) -> Iterator[tuple[bool, Tensor, Batch]]:
    """Yield (whether a group of contexts starts, positions of the next span, the span).

    Each rank takes every n-th context of a group. All ranks run the same number of spans, because
    the model may communicate; a rank without contexts gets padding.
    """
    all_begins, all_ends, documents = contexts
    rank, n_processes = share
    for first in range(0, len(all_begins), batch_size):
        group = slice(first, first + batch_size)
        longest = int(all_ends[first] - all_begins[first])  # the longest come first
        begins, ends = all_begins[group][rank::n_processes], all_ends[group][rank::n_processes]
        if not len(begins):
            begins = ends = all_begins[first : first + 1]
        for offset in range(0, longest, span):
            n_rows = max(int((ends - begins > offset).sum()), 1)
            n = min(span, longest - offset)
            positions = read_positions(split, begins[:n_rows], offset, n)
            batch = read_rows(split, begins[:n_rows], ends[:n_rows], offset, n, documents)
            yield offset == 0, positions, batch
