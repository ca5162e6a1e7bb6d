"""A request to the engine: what it asks for, its events, and its way through the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import to_device
from transformer_vq.generation.prefill import Context, segments
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.text import TextStream
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.serve.prefixes import PrefixStore, is_stored, prefix_digests

logger = logging.getLogger(__name__)

Reason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why a request ended. stop: the model ended the document, or a stop string occurred."""


@dataclass(frozen=True)
class Start:
    """A context to continue from, and what identifies it."""

    context: Context
    digest: bytes
    n_tokens: int = 0


@dataclass(frozen=True)
class Request:
    """One text to generate.

    The result depends on nothing else: not on other requests, nor on when it is processed.
    """

    prompt: Sequence[int]
    """Tokens; they start with the tokenizer's bos unless they continue `start`."""
    max_new_tokens: int  # 0 only prefills the prompt, and returns the context after it
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0  # number of this text among the samples of a prompt; they share the seed
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it
    n_logprobs: int | None = None
    """Report the log probability of each token, and this many of the most likely ones."""
    scores_prompt: bool = False  # if log probabilities are reported, report those of the prompt too
    start: Start | None = None
    deadline: float | None = None
    """Time of `time.monotonic` at which the request ends with reason "timeout"."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log probability of a token, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """How a request ended."""

    reason: Reason
    text: str  # the whole text
    n_prompt: int
    n_cached: int  # tokens of the prompt that were not processed again
    n_new: int
    context: Context | None = None
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """What is new: first that the prompt is processed, then one event per token, then the end."""

    text: str = ""  # text that is final now. What may be the start of a stop string is held back
    scores: tuple[TokenScore | None, ...] = ()
    """Log probabilities, if they were asked for; None for the first token of a prompt."""
    end: Finished | None = None


Notify = Callable[[Event], None]
"""Receives the events of a request, on the thread of the engine; it must not block."""


class Generation:
    """A request on its way through the engine: waiting, prefill, decoding, finished.

    Only the engine's thread calls its methods, except `cancel`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, notify: Notify) -> None:
        self.request = request
        self._notify = notify
        self._text = TextStream(tokenizer, request.stop)
        self._ends = {tokenizer.eod, *tokenizer.stops}
        self._scores_prompt = request.scores_prompt and request.n_logprobs is not None
        self._rng = np.random.default_rng([request.seed, request.sample])
        self.submitted = time.monotonic()
        self.last_token: float | None = None  # time of the last token, if there was one
        self.slot: int | None = None  # set by the engine when the request is processed
        self.is_decoding = self.is_cancelled = False
        self.reason: Reason | None = None
        self.n_cached = self.n_new = self._n_prefilled = 0
        self._digests: dict[int, bytes] | None = None
        self._scores: list[TokenScore | None] = []
        self.context = None if request.start is None else request.start.context
        """The context after the part of the prompt that is processed."""

    def cancel(self) -> None:
        """Ask the engine to end the request between two steps."""
        self.is_cancelled = True

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def n_to_prefill(self) -> int:
        """Tokens of the prompt that are still to be processed."""
        return len(self.request.prompt) - self._n_prefilled

    def reuse(self, prefixes: PrefixStore) -> None:
        """Continue from the longest stored prefix of the prompt; only the first call does so."""
        if self._digests is not None:
            return
        start = self.request.start
        self._digests = prefix_digests(self.request.prompt, b"" if start is None else start.digest)
        if self._scores_prompt:
            self._scores = [None]
            return
        for n, digest in reversed(self._digests.items()):
            if (found := prefixes.get(digest)) is not None:
                self.context, self._n_prefilled, self.n_cached = found, n, n
                return

    def prefill(self, model: TransformerVQ, prefixes: PrefixStore) -> None:
        """Process the next segment of the prompt."""
        request = self.request
        begin, end = next(segments(len(request.prompt), self._n_prefilled))
        device = next(model.parameters()).device
        tokens = to_device(torch.as_tensor(request.prompt[begin:end]), device)
        state = model.init_state(1) if self.context is None else self.context.state
        n_logits = end - begin if self._scores_prompt else 1
        output = model(tokens.unsqueeze(0), state, n_logits=n_logits)
        self.context = Context(output.logits[:, -1].clone(), output.state)
        self._n_prefilled = end
        if self._scores_prompt:
            known = request.prompt[begin + 1 : end + 1]
            found = scores(output.logits[0, : len(known)], known, request.n_logprobs or 0)
            self._scores.extend(found)
        assert self._digests is not None
        if is_stored(end, list(self._digests)):
            prefixes.put(self._digests[end], self.context)

    def send_prefilled(self) -> None:
        """Report that the prompt is processed."""
        event = Event(scores=tuple(self._scores))
        self._scores = []  # large
        self._send(event)

    def uniform(self) -> float:
        """Return the random number that chooses the next token."""
        return float(self._rng.random())

    def add(self, token: int, logits: Tensor) -> None:
        """Report a token that was chosen by its logits, or finish with it."""
        self.n_new += 1
        if token in self._ends:
            self.finish("stop", self._text.end())
            return
        n_top = self.request.n_logprobs
        score = () if n_top is None else tuple(scores(logits.unsqueeze(0), [token], n_top))
        self._send(Event(self._text.push(token), score))
        if self._text.stopped:
            self.finish("stop")
        elif self.n_new == self.request.max_new_tokens:
            self.finish("length", self._text.end())

    def finish(self, reason: Reason, rest: str = "", error: str | None = None) -> None:
        """Report the end of the request, once. rest: the end of the text, if it was held back."""
        if self.finished:
            return
        self.reason, n_prompt = reason, len(self.request.prompt)
        is_returned = self.request.max_new_tokens == 0 and self.n_to_prefill == 0
        context = self.context if is_returned else None
        end = Finished(reason, self._text.text, n_prompt, self.n_cached, self.n_new, context, error)
        self._send(Event(rest, end=end))

    def _send(self, event: Event) -> None:
        """Report an event; a receiver that fails ends its own request and no other."""
        try:
            self._notify(event)
        except Exception:
            logger.exception("the receiver of a request failed")
            self.cancel()


def scores(logits: Tensor, tokens: Sequence[int], n_top: int) -> list[TokenScore]:
    """Return the log probabilities of tokens, and of the most likely ones at their places.

    logits: [n, vocab_size], for n tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.as_tensor(tokens, device=logits.device).unsqueeze(-1))
    top, places = logprobs.topk(min(n_top, logits.shape[-1]), dim=-1)
    rows = zip(tokens, chosen[:, 0].tolist(), places.tolist(), top.tolist(), strict=True)
    return [
        TokenScore(int(token), logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]
