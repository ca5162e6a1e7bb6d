"""What all routes share: the model and its name, the engine, limits, and events of requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request as HTTPRequest

from transformer_vq.data.tokenizers import Tokenizer
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

    def check_model(self, name: str | None) -> None:
        """Raise APIError if a request names another model."""
        if name not in (None, self.name):
            message = f"the model {name!r:.80} does not exist; this server has {self.name!r}"
            raise APIError(404, message, "model", "model_not_found")

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

    async def events(
        self, requests: Sequence[Request], client: HTTPRequest
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Submit requests; yield their events with the number of the request.

        Raises APIError if one of them fails or the client disconnects. All are cancelled when the
        generator is closed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def notify(number: int, event: Event) -> None:  # on the engine's thread: never blocks
            loop.call_soon_threadsafe(events.put_nowait, (number, event))

        pairs = [(request, partial(notify, number)) for number, request in enumerate(requests)]
        generations = self.engine.submit_all(pairs)
        n_left, checked = len(requests), time.monotonic()
        try:
            while n_left:
                found = None
                with suppress(TimeoutError):
                    found = await asyncio.wait_for(events.get(), POLL_SECONDS)
                if found is not None:
                    if found[1].end is not None:
                        _check_end(found[1].end)
                        n_left -= 1
                    yield found
                if time.monotonic() - checked > POLL_SECONDS:
                    await check_connected(client)
                    checked = time.monotonic()
        finally:
            for generation in generations:
                generation.cancel()


async def check_connected(client: HTTPRequest) -> None:
    """Raise APIError, which nobody sees, if a client has disconnected."""
    if await client.is_disconnected():
        raise APIError(400, "the client disconnected")


def _check_end(end: Finished) -> None:
    """Raise APIError if a request did not end by itself."""
    if end.reason == "timeout":
        raise APIError(408, "the request took too long; ask for fewer tokens", code="timeout")
    if end.reason == "cancelled":
        raise APIError(503, "the server is shutting down", code="shutting_down")
    if end.reason == "error":
        raise APIError(500, f"{end.error}; the log of the server has details")
