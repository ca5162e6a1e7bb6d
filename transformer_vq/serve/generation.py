"""One request on its way through the engine: waiting, prefill, decoding, finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.generation.prefill import SEGMENT_LEN, Context
from transformer_vq.generation.text import TextStream
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.serve.prefixes import PrefixStore, is_stored, prefix_digests
from transformer_vq.serve.requests import (
    Event,
    Finished,
    NewToken,
    PromptRead,
    Reason,
    Request,
    TokenScore,
)
from transformer_vq.transfer import to_device

logger = logging.getLogger(__name__)

Notify = Callable[[Event], None]
"""Receives the events of a request, on the thread of the engine; it must not block."""


class Generation:
    """A request, what is known about it so far, and a way to cancel it.

    Only the engine's thread calls its methods, except `cancel` and `is_cancelled`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, notify: Notify) -> None:
        self.request = request
        self._notify = notify
        self._text = TextStream(tokenizer, request.stop)
        has_end = request.stop_at_end and tokenizer.eod is not None
        self._stop_token = tokenizer.eod if has_end else None
        self._rng = np.random.default_rng([request.seed, request.sample])
        self._cancelled = threading.Event()
        self.submitted = time.monotonic()
        self.last_token: float | None = None
        """Time of the last token, if there was one."""
        self.reason: Reason | None = None
        self.n_cached = 0
        self.n_new = 0
        self._n_read = 0
        self._digests: dict[int, bytes] | None = None
        self._scores: list[TokenScore | None] = []
        self._context = None if request.start is None else request.start.context

    def cancel(self) -> None:
        """Ask the engine to end the request between two steps."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def context(self) -> Context:
        """The context after the prompt."""
        assert self._context is not None
        return self._context

    # Prefill

    @property
    def n_unread(self) -> int:
        """Tokens of the prompt that are still to be processed."""
        return len(self.request.prompt) - self._n_read

    def reuse(self, prefixes: PrefixStore) -> None:
        """Continue from the longest stored prefix of the prompt; only the first call does so."""
        if self._digests is not None:
            return
        request = self.request
        start = b"" if request.start is None else request.start.digest
        self._digests = prefix_digests(request.prompt, start)
        if request.scores_prompt:
            self._scores = [None]
            return
        for n, digest in reversed(self._digests.items()):
            found = prefixes.get(digest)
            if found is not None:
                self._context, self._n_read, self.n_cached = found, n, n
                return

    def read(self, model: TransformerVQ, prefixes: PrefixStore) -> None:
        """Process one segment of the prompt; segments are cut where `prefill` cuts them."""
        request = self.request
        begin = self._n_read
        end = min(begin + SEGMENT_LEN, len(request.prompt))
        device = next(model.parameters()).device
        tokens = to_device(torch.as_tensor(request.prompt[begin:end]), device)
        state = model.init_state(1) if self._context is None else self._context.state
        n_logits = end - begin if request.scores_prompt else 1
        output = model(tokens.unsqueeze(0), state, n_logits=n_logits)
        self._context = Context(output.logits[:, -1].clone(), output.state)
        self._n_read = end
        if request.scores_prompt:
            known = request.prompt[begin + 1 : end + 1]
            found = scores(output.logits[0, : len(known)], known, request.n_logprobs or 0)
            self._scores.extend(found)
        assert self._digests is not None
        if is_stored(end, len(request.prompt)):
            prefixes.put(self._digests[end], self._context)

    def start_decoding(self) -> None:
        """Report that the prompt was read."""
        read = PromptRead(tuple(self._scores))
        self._scores = []  # large
        self._send(read)

    # Decoding

    def uniform(self) -> float:
        """Return the random number that chooses the next token."""
        return float(self._rng.random())

    def add(self, token: int, score: TokenScore | None) -> None:
        """Report a token, or finish with it."""
        self.n_new += 1
        if token == self._stop_token:
            self.finish("stop", self._text.end())
            return
        text = self._text.push(token)
        self._send(NewToken(token, text, score))
        if self._text.stopped:
            self.finish("stop")
        elif self.n_new == self.request.max_new_tokens:
            self.finish("length", self._text.end())

    def finish(self, reason: Reason, text: str = "", error: str | None = None) -> None:
        """Report the end of the request, once."""
        if self.finished:
            return
        self.reason = reason
        is_read = self._context is not None and self.n_unread == 0
        keeps = self.request.keeps_context and is_read
        n_prompt = len(self.request.prompt)
        context = self._context if keeps else None
        self._send(Finished(reason, text, n_prompt, self.n_cached, self.n_new, context, error))

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
