"""Evaluation: bits per byte, word-level perplexity, loss by position in context.

Two protocols. `windowed` is the paper's: the split is cut into sequences of T tokens, each with a
fresh state. `streaming` carries one state through every whole document, however long it is: what a
model with constant cost per token can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.checkpoint import load_model, read_config, read_tokenizer
from transformer_vq.config import DataConfig
from transformer_vq.data.batches import Batch, cuts_documents, read_rows
from transformer_vq.data.corpora import Split, SplitSize, prepare
from transformer_vq.data.tokenizer import MODEL_FILE
from transformer_vq.errors import UserError
from transformer_vq.nn.device import evaluating, matmul_precision
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar

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
    """How well a model predicts some text: totals, and what follows from them."""

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
        """exp(nats per word of the original text); infinite where that is beyond any number."""
        if not self.words:
            return None
        per_word = self.nats / self.words
        return math.exp(per_word) if per_word < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        perplexity = self.word_perplexity
        return {
            "protocol": self.protocol,
            "bits_per_byte": self.bits_per_byte,
            "nats_per_token": self.nats_per_token,
            "word_perplexity": None if perplexity == math.inf else perplexity,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
            "by_position": [vars(position_bin) for position_bin in self.by_position],
        }


def evaluate(
    model: TransformerVQ,
    split: Split,
    protocol: Protocol = "windowed",
    *,
    seq_len: int,
    window: int = 2048,
    batch_size: int = 8,
    precision: str = "fp32",
    max_tokens: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
    stopped: Callable[[], bool] = lambda: False,
    share: tuple[int, int] = (0, 1),
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> Evaluation | None:
    """Score every token of the split once, with as much context as the protocol gives it.

    seq_len: T of the windowed protocol. window, batch_size: how much is worked on at a time; they
    change memory and speed, not the result. max_tokens: only the start of the split; bytes and
    words are then taken in proportion. Returns None if `stopped` says so. share: the number of
    this process and of all that divide the contexts among them; `total` sums over them.
    """
    _check_sizes(seq_len=seq_len, window=window, batch_size=batch_size, max_tokens=max_tokens)
    device = next(model.parameters()).device
    nats = torch.zeros(N_BINS, dtype=torch.float64, device=device)
    count = torch.zeros(N_BINS, dtype=torch.int64, device=device)
    with evaluating(model), matmul_precision(device, precision):
        state, of_group = None, -1
        contexts = _contexts(split, protocol, seq_len, max_tokens)
        for group, n_rows, batch in _windows(split, contexts, batch_size, window, share):
            if stopped():
                return None
            if group != of_group:
                state, of_group = None, group
            elif state is not None and n_rows < len(state.position):
                state = state.select(torch.arange(n_rows, device=device))
            batch = batch.map(lambda x: x.to(device))
            output = model(batch.tokens, state, batch.valid, batch.document_ids)
            state = output.state
            losses = F.cross_entropy(
                output.logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
            )
            valid = batch.valid
            weight = torch.ones_like(batch.targets) if valid is None else valid.long()
            bins = position_bin(batch.positions).flatten()
            nats.index_add_(0, bins, losses.double() * weight.flatten())
            count.index_add_(0, bins, weight.flatten())
            advance(batch.n_targets)
    return _summary(protocol, total(nats).tolist(), total(count).tolist(), split.size)


def position_bin(positions: Tensor) -> Tensor:
    """floor(log2(p + 1)), taken from the exponent: a logarithm may round across a power of two."""
    return (positions + 1).double().frexp().exponent.long() - 1


def evaluate_run(
    run: Path,
    *,
    data: DataConfig | None = None,
    split: str = "test",
    protocols: Sequence[Protocol] | None = None,
    checkpoint: str = "best",
    seq_len: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    precision: str = "fp32",
    device: torch.device | None = None,
) -> tuple[dict[str, Any], list[Evaluation]]:
    """Evaluate a model of a run, on its own data or on others: what was done, and the results.

    protocols: both by default, for full attention only `windowed`, since its cost grows.
    """
    _check_sizes(seq_len=seq_len, batch_size=batch_size, max_tokens=max_tokens)
    config = read_config(run)
    model, which = load_model(run, checkpoint)
    model.to(device or torch.device("cpu"))
    data = config.data if data is None else data
    vocabulary = run / MODEL_FILE
    is_other = data != config.data and data.tokenizer == config.data.tokenizer
    if vocabulary.is_file() and is_other and data.dataset == "pg19":
        data = replace(data, tokenizer=str(vocabulary))  # other books in the run's own pieces
    corpus = prepare(data, config.model.vocab_size)
    if read_tokenizer(run).sha256 != corpus.tokenizer().sha256:
        raise UserError(
            f"these data do not have the vocabulary of {run}; use books (--data.dataset pg19) and "
            f"--data.tokenizer {vocabulary}"
        )
    tokens = corpus.split(split)
    if protocols is None:
        both: tuple[Protocol, ...] = ("windowed", "streaming")
        protocols = both[:1] if config.model.attention == "full" else both
    train = config.train
    seq_len = train.seq_len if seq_len is None else seq_len
    if batch_size is None:
        batch_size = train.batch_size // max(train.accumulate, 1)
    results = []
    for protocol in protocols:
        total = len(tokens) if max_tokens is None else min(len(tokens), max_tokens)
        with progress_bar(f"{split}, {protocol}", total, "tokens") as advance:
            result = evaluate(
                model,
                tokens,
                protocol,
                seq_len=seq_len,
                window=min(train.backprop_len, 2048),
                batch_size=batch_size,
                precision=precision,
                max_tokens=max_tokens,
                advance=advance,
            )
        assert result is not None, "nothing could stop it"
        results.append(result)
    facts = {
        "run": str(run),
        "checkpoint": which,
        "dataset": corpus.dataset,
        "split": split,
        "seq_len": seq_len,
        "attention": config.model.attention,
        "protocols": {result.protocol: result.to_dict() for result in results},
    }
    return facts, results


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{name}={size}: must be at least 1")


def _contexts(
    split: Split, protocol: Protocol, seq_len: int, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Where contexts begin and end, longest first, and whether one may hold several documents."""
    size = len(split) if max_tokens is None else min(max_tokens, len(split))
    if protocol == "windowed":
        begins = np.arange(0, size, seq_len)
        ends = np.minimum(begins + seq_len, size)
        documents = cuts_documents(split, seq_len)
    else:
        begins = np.asarray(split.starts)
        begins = begins[begins < size]
        ends = np.append(begins[1:], size)
        documents = False
    order = np.argsort(begins - ends, kind="stable")
    return begins[order], ends[order], documents


def _windows(
    split: Split,
    contexts: tuple[np.ndarray, np.ndarray, bool],
    batch_size: int,
    window: int,
    share: tuple[int, int],
) -> Iterator[tuple[int, int, Batch]]:
    """(number of the group of contexts, rows still going on, their next window).

    Of each group a process takes every n-th context. All go through the same number of windows,
    because they may need each other for the model; one that has no context left gets padding.
    """
    all_begins, all_ends, documents = contexts
    rank, n_processes = share
    for first in range(0, len(all_begins), batch_size):
        group = slice(first, first + batch_size)
        longest = int(all_ends[first] - all_begins[first])  # the longest come first
        begins, ends = all_begins[group][rank::n_processes], all_ends[group][rank::n_processes]
        if not len(begins):
            begins = ends = all_begins[first : first + 1]
        for offset in range(0, longest, window):
            n_rows = max(int((ends - begins > offset).sum()), 1)
            n = min(window, longest - offset)
            yield (
                first,
                n_rows,
                read_rows(split, begins[:n_rows], ends[:n_rows], offset, n, documents),
            )


def _summary(
    protocol: Protocol, nats: list[float], count: list[int], size: SplitSize
) -> Evaluation:
    tokens = sum(count)
    share = tokens / size.tokens
    bins = tuple(
        PositionBin(2**i - 1, 2 ** (i + 1) - 2, count[i], nats[i] / count[i])
        for i in range(N_BINS)
        if count[i]
    )
    return Evaluation(
        protocol=protocol,
        nats=sum(nats),
        tokens=tokens,
        bytes=round(size.bytes * share),
        words=None if size.words is None else round(size.words * share),
        by_position=bins,
    )
