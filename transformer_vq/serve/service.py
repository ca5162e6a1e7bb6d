"""What all routes share: the model and its name, the engine, limits, and how requests are made."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool

from transformer_vq.data.tokenizers import CHUNK_CHARS, Tokenizer, divide
from transformer_vq.generation import NEW_TOKENS
from transformer_vq.generation.sampling import Sampling
from transformer_vq.serve.contexts import ContextStore
from transformer_vq.serve.engine import Engine
from transformer_vq.serve.requests import Event, Finished, Request, Start
from transformer_vq.serve.schema import APIError, GenerationBody

POLL_SECONDS = 0.5  # how often a waiting response checks that its client is still connected


@dataclass(frozen=True)
class Limits:
    """What a single request may ask for."""

    body_bytes: int = 64_000_000
    """Size of a request in bytes."""
    prompt_tokens: int = 4_000_000
    """Tokens of a document, or of all prompts of a request."""
    new_tokens: int = 65_536
    """Tokens to generate per text."""
    seconds: float = 600.0
    """Time from arrival to the last token."""


@dataclass
class Service:
    """One served model."""

    name: str
    engine: Engine
    contexts: ContextStore
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    chat_template: str | None = None
    """Jinja template that converts messages to a prompt."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def vocab_size(self) -> int:
        size: int = self.engine.model.config.vocab_size
        return size

    def check_model(self, name: str | None) -> None:
        """Raise APIError if a request names another model."""
        if name not in (None, self.name):
            message = f"the model {name!r:.80} does not exist; this server has {self.name!r}"
            raise APIError(404, message, "model", "model_not_found")

    async def open_context(self, context: str | None) -> Start | None:
        """Return the stored context of an id; raise APIError if there is none."""
        return None if context is None else await run_in_threadpool(self.contexts.open, context)

    async def encode(self, text: str, param: str, client: HTTPRequest) -> list[int]:
        """Return the tokens of a text; long ones don't block other requests.

        Raises APIError for too many tokens, and if the client has disconnected meanwhile.
        """

        def encode(part: str) -> list[int]:
            part.encode()
            found: list[int] = self.tokenizer.encode_batch([part])[0].tolist()
            return found

        cuts, tokens = self.tokenizer.cuts, list[int]()
        parts = [text]
        if cuts is not None and len(text) > CHUNK_CHARS:
            parts = await run_in_threadpool(divide, text, CHUNK_CHARS, cuts)
        try:
            for part in parts:
                await check_connected(client)
                tokens += await run_in_threadpool(encode, part)
                self.check_length(len(tokens), param)
        except UnicodeEncodeError:
            message = f"{param}: is not valid Unicode (a lone surrogate)"
            raise APIError(400, message, param) from None
        return tokens

    async def tokens_of(
        self, text: str, tokens: list[int] | None, client: HTTPRequest, start: Start | None
    ) -> list[int]:
        """Return the tokens of a document that is given as a text, or as tokens to use as they are.

        start: the context that it continues; without one, a text starts with bos.
        """
        if tokens is None:
            bos = [] if start is not None else [self.tokenizer.bos]
            tokens = bos + await self.encode(text, "text", client)
        self.check_tokens(tokens, "text")
        if not tokens:
            raise APIError(400, "the text is empty; give text or tokens")
        return tokens

    def check_length(self, n_tokens: int, param: str) -> None:
        """Raise APIError for too many tokens."""
        limit = self.limits.prompt_tokens
        if n_tokens > limit:
            message = f"{param}: has more than {limit:,} tokens; send a shorter text"
            raise APIError(413, message, param, "prompt_too_long")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise APIError if token ids are unknown, or too many."""
        self.check_length(len(tokens), param)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            message = f"{param}: token ids must be from 0 to {self.vocab_size - 1}"
            raise APIError(400, message, param)

    def requests(
        self,
        body: GenerationBody,
        prompt: Sequence[int],
        start: Start | None,
        n_logprobs: int | None = None,
        scores_prompt: bool = False,
    ) -> list[Request]:
        """Return the engine's requests for the samples of a prompt; without a seed they vary."""
        limit, wanted = self.limits.new_tokens, body.n_new_tokens
        if wanted is not None and wanted > limit:
            raise APIError(400, f"max_tokens: must be at most {limit:,}", "max_tokens")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return [
            Request(
                prompt=prompt,
                max_new_tokens=min(NEW_TOKENS, limit) if wanted is None else wanted,
                sampling=Sampling(body.temperature, body.top_p, body.top_k),
                seed=seed,
                sample=sample,
                stop=tuple(body.stop),
                n_logprobs=n_logprobs,
                scores_prompt=scores_prompt,
                start=start,
                deadline=time.monotonic() + self.limits.seconds,
            )
            for sample in range(body.n)
        ]

    @asynccontextmanager
    async def events(
        self, requests: Sequence[Request], client: HTTPRequest
    ) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
        """Submit requests; yield their events with the number of the request.

        Raises APIError if one of them fails or the client disconnects. All are cancelled when the
        context is left.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def notify(number: int, event: Event) -> None:  # on the engine's thread: never blocks
            loop.call_soon_threadsafe(events.put_nowait, (number, event))

        pairs = [(request, partial(notify, number)) for number, request in enumerate(requests)]
        generations = self.engine.submit_all(pairs)
        try:
            yield self._until_finished(events, len(requests), client)
        finally:
            for generation in generations:
                generation.cancel()

    async def _until_finished(
        self, events: asyncio.Queue[tuple[int, Event]], n_left: int, client: HTTPRequest
    ) -> AsyncIterator[tuple[int, Event]]:
        checked = time.monotonic()
        while n_left:
            found = None
            with suppress(TimeoutError):
                found = await asyncio.wait_for(events.get(), POLL_SECONDS)
            if found is not None:
                if isinstance(found[1], Finished):
                    _check_finished(found[1])
                    n_left -= 1
                yield found
            if time.monotonic() - checked > POLL_SECONDS:
                await check_connected(client)
                checked = time.monotonic()


async def check_connected(client: HTTPRequest) -> None:
    """Raise APIError, which nobody sees, if a client has disconnected."""
    if await client.is_disconnected():
        raise APIError(400, "the client disconnected")


def _check_finished(event: Finished) -> None:
    """Raise APIError if a request did not end by itself."""
    if event.reason == "timeout":
        raise APIError(408, "the request took too long; ask for fewer tokens", code="timeout")
    if event.reason == "cancelled":
        raise APIError(503, "the server is shutting down", code="shutting_down")
    if event.reason == "error":
        raise APIError(500, f"{event.error}; the log of the server has details")
