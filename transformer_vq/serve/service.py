"""What all routes share: the model and its name, limits, prompts, and events of requests."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool

from transformer_vq.data.chat_template import compile_chat_template
from transformer_vq.data.tokenizers import CHUNK_CHARS, Tokenizer, divide
from transformer_vq.generation import NEW_TOKENS, TEMPERATURE, TOP_P
from transformer_vq.generation.sampling import Sampling
from transformer_vq.serve.contexts import ContextStore
from transformer_vq.serve.engine import Engine
from transformer_vq.serve.requests import Event, Finished, Request, Start
from transformer_vq.serve.schema import APIError, ChatBody, CompletionBody, GenerationBody

POLL_SECONDS = 0.5  # how often a waiting response checks that its client is still connected
MAX_TEXTS = 256  # per request: prompts times n
MAX_SCORES = 100_000  # log probabilities of prompts per request; each takes about 700 bytes
MAX_CHARACTERS = 64  # per token of the limit; longer texts are rejected before they are encoded


@dataclass(frozen=True)
class Limits:
    """What a single request may ask for."""

    body_bytes: int = 64_000_000  # size of a request in bytes
    prompt_tokens: int = 4_000_000  # tokens of a document, or of all prompts of a request
    new_tokens: int = 65_536  # tokens to generate per text
    seconds: float = 600.0  # time from arrival to the last token


@dataclass
class Service:
    """One served model."""

    name: str
    engine: Engine
    contexts: ContextStore
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    chat_template: str | None = None  # Jinja template that converts messages to a prompt
    sampling: Sampling = field(default_factory=lambda: Sampling(TEMPERATURE, TOP_P))
    """What requests leave out."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise APIError if a request names another model."""
        if name not in (None, self.name):
            message = f"the model {name!r:.80} does not exist; this server has {self.name!r}"
            raise APIError(404, message, "model", "model_not_found")

    async def prompts(
        self, client: HTTPRequest, context: str | None, limit: int | None = None
    ) -> Prompts:
        """Return the reader of a request's prompts. limit: of the tokens of all together."""
        start = None
        if context is not None:
            start = await run_in_threadpool(self.contexts.open, context)
        return Prompts(self, client, start, limit or self.limits.prompt_tokens)

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
                sampling=self.sampling.override(body.temperature, body.top_p, body.top_k),
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
                with suppress(TimeoutError):
                    number, event = await asyncio.wait_for(events.get(), POLL_SECONDS)
                    if event.end is not None:
                        _check_end(event.end)
                        n_left -= 1
                    yield number, event
                if time.monotonic() - checked > POLL_SECONDS:
                    await check_connected(client)
                    checked = time.monotonic()
        finally:
            for generation in generations:
                generation.cancel()


class Prompts:
    """Checks and converts the prompts of one HTTP request.

    start: the stored context that they continue; without one, texts start with bos. All methods
    raise APIError for what is invalid or too long, and if the client has disconnected.
    """

    def __init__(
        self, service: Service, client: HTTPRequest, start: Start | None, limit: int
    ) -> None:
        self._service, self._client, self.start, self._limit = service, client, start, limit
        self._tokenizer = service.tokenizer
        self._bos = [self._tokenizer.bos] if start is None else []
        self._n_tokens = 0

    async def completions(self, body: CompletionBody) -> list[tuple[Sequence[int], str]]:
        """Return the tokens of all prompts, and the texts to echo."""
        given = body.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
            given = [given]
        if not isinstance(given, list) or not given:
            message = "give a text, a list of texts, a list of token ids, or a list of these"
            raise APIError(400, f"prompt: {message}", "prompt")
        self._check_number(len(given) * body.n)
        found: list[tuple[Sequence[int], str]] = []
        for item in given:
            if not isinstance(item, str | list) or item == []:
                message = "prompt: every entry must be a text or a list of token ids"
                raise APIError(400, message, "prompt")
            tokens, echo = await self._tokens(item, "prompt"), item if body.echo else ""
            if isinstance(echo, list):
                content = await run_in_threadpool(self._tokenizer.decode, tokens)
                echo = content.decode(errors="replace")
            found.append((tokens, echo))
        n_scored, n_top = self._n_tokens * body.n, 1 + (body.logprobs or 0)
        if body.echo and body.logprobs is not None and n_scored * n_top > MAX_SCORES:
            message = f"echo with logprobs={body.logprobs}: the prompts have {n_scored:,} tokens"
            limit = f"at most {MAX_SCORES // n_top:,} are scored; send fewer at a time"
            raise APIError(400, f"{message}, but {limit}", "logprobs")
        return found

    async def document(self, text: str | None, tokens: list[Any] | None) -> Sequence[int]:
        """Return the tokens of a document: those of a text, or tokens to use as they are."""
        found = await self._tokens(text or "" if tokens is None else tokens, "text")
        if not found:
            raise APIError(400, "the text is empty; give text or tokens")
        return found

    async def messages(self, body: ChatBody) -> Sequence[int]:
        """Return the prompt of a conversation.

        Names of special tokens are tokens in the template, and text in the messages.
        """
        template = self._service.chat_template
        if template is None:
            message = "this model has no chat template; use /v1/completions"
            raise APIError(400, message, code="no_chat_template")
        self._check_number(body.n)
        special: dict[str, int] = getattr(self._tokenizer, "special_tokens", {})
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        # Divides names in messages while they are rendered; unknown to clients, and without
        # letters, which a template may change.
        mark = str(secrets.randbits(128))

        def divided(value: Any) -> Any:
            if isinstance(value, dict):
                return {divided(key): divided(x) for key, x in value.items()}
            if isinstance(value, list):
                return [divided(x) for x in value]
            if isinstance(value, str) and names:
                return re.sub(names, lambda name: mark.join(name[0]) + mark, value)
            return value

        def render() -> str:
            named: dict[int | None, str] = {token: name for name, token in special.items()}
            try:
                return compile_chat_template(template).render(
                    messages=[divided(message.plain()) for message in body.messages],
                    add_generation_prompt=True,
                    bos_token=named.get(self._tokenizer.bos, ""),
                    eos_token=named.get(self._tokenizer.eod, ""),
                )
            except Exception as error:  # whatever a template does with unexpected fields
                reason = " ".join(str(error).split())
                message = f"messages: the chat template rejects them: {reason:.200}"
                raise APIError(400, message, "messages") from error

        text = await run_in_threadpool(render)
        tokens: list[int] = []
        for part in re.split(f"({names})", text) if names else [text]:
            if part in special:
                tokens.append(special[part])
            elif part:
                tokens += await self._encode(part.replace(mark, ""), "messages")
        has_start = any(text.startswith(name) for name in special)  # the template's own
        prompt = tokens if has_start else self._bos + tokens
        self._count(len(prompt) - self._n_tokens, "messages")  # special tokens
        return prompt

    async def _tokens(self, given: str | list[Any], param: str) -> list[int]:
        """Return the tokens of a text, after bos unless it continues a context; or check tokens."""
        if isinstance(given, str):
            self._count(len(self._bos), param)
            return self._bos + await self._encode(given, param)
        self._count(len(given), param)
        last = self._service.engine.model.config.vocab_size - 1

        def are_valid() -> bool:
            return all(type(x) is int and 0 <= x <= last for x in given)

        if not await run_in_threadpool(are_valid):
            raise APIError(400, f"{param}: token ids must be from 0 to {last}", param)
        return given

    async def _encode(self, text: str, param: str) -> list[int]:
        """Return the tokens of a text, without bos; long ones don't block other requests."""

        def encode(part: str) -> list[int]:
            part.encode()
            found: list[int] = self._tokenizer.encode_batch([part])[0].tolist()
            return found

        if len(text) > MAX_CHARACTERS * self._limit:
            self._count(self._limit + 1, param)
        cuts, parts, tokens = self._tokenizer.cuts, [text], list[int]()
        if cuts is not None and len(text) > CHUNK_CHARS:
            parts = await run_in_threadpool(divide, text, CHUNK_CHARS, cuts)
        try:
            for part in parts:
                await check_connected(self._client)
                found = await run_in_threadpool(encode, part)
                self._count(len(found), param)
                tokens += found
        except UnicodeEncodeError:
            message = f"{param}: is not valid Unicode (a lone surrogate)"
            raise APIError(400, message, param) from None
        return tokens

    def _count(self, n: int, param: str) -> None:
        """Count tokens of prompts; raise APIError above the limit."""
        self._n_tokens += n
        if self._n_tokens > self._limit:
            message = f"{param}: has more than {self._limit:,} tokens; send a shorter text"
            raise APIError(413, message, param, "prompt_too_long")

    def _check_number(self, n: int) -> None:
        """Raise APIError if a request asks for more texts than can ever be queued."""
        limit = min(MAX_TEXTS, self._service.engine.max_waiting)
        if n > limit:
            message = f"{n} texts are requested (prompts times n), but at most {limit} are accepted"
            raise APIError(400, message, "n")


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
