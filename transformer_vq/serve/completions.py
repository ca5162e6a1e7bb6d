"""POST /v1/completions: text that continues prompts, as one JSON object or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.serve.bodies import body_route
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Event, NewToken, PromptRead, TokenScore
from transformer_vq.serve.schema import CompletionBody
from transformer_vq.serve.service import Service, check_finished
from transformer_vq.serve.streaming import stream_response

MAX_TEXTS = 256  # per request: prompts times n
MAX_SCORES = 100_000  # log probabilities of prompts per request; each takes about 700 bytes


def completions_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=body_route(service.limits.prompt_tokens))

    @router.post("/v1/completions", response_model=None, tags=["generation"])
    async def completions(body: CompletionBody, client: HTTPRequest) -> Response:
        """Continue one or several prompts."""
        service.check_model(body.model)
        max_tokens = service.new_tokens(body.max_tokens)
        start = await service.start(body.context)
        prompts = await read_prompts(service, body, client)
        scores_prompt = body.echo and body.logprobs is not None
        if scores_prompt:
            check_scores(sum(len(prompt.tokens) for prompt in prompts) * body.n, body.logprobs or 0)
        seed = service.seed(body)
        requests = [
            service.request(
                body,
                prompt.tokens,
                max_tokens,
                seed=seed,
                sample=sample,
                start=start,
                n_logprobs=body.logprobs,
                scores_prompt=scores_prompt,
            )
            for prompt in prompts
            for sample in range(body.n)
        ]
        echoes = [prompt.text if body.echo else "" for prompt in prompts for _ in range(body.n)]
        n_start = 0 if start is None else start.n_tokens
        texts = [Text(service.tokenizer, echo, n_start) for echo in echoes]
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

        def choice(i: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
            return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}

        async def stream(events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[dict[str, Any]]:
            async for i, event in events:
                text, reason = texts[i].add(event)
                logprobs = texts[i].new_logprobs() if body.logprobs is not None else None
                if text or reason or (logprobs and logprobs["tokens"]):
                    yield head | {"choices": [choice(i, text, reason, logprobs)]}
            if body.includes_usage:
                yield head | {"choices": [], "usage": usage(texts, body.n)}

        if body.stream:
            return await stream_response(service, requests, client, stream)
        async with service.events(requests, client) as events:
            async for i, event in events:
                texts[i].add(event)
        choices = [
            choice(i, x.text, x.reason, x.new_logprobs() if body.logprobs is not None else None)
            for i, x in enumerate(texts)
        ]
        return JSONResponse(head | {"choices": choices, "usage": usage(texts, body.n)})

    return router


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, starting with bos, and as text."""

    tokens: Sequence[int]
    text: str


async def read_prompts(service: Service, body: CompletionBody, client: HTTPRequest) -> list[Prompt]:
    """Return the prompts of a body; raise APIError if they are of other types, or too many."""
    given = body.prompt
    bos = [] if body.context is not None else [service.tokenizer.bos]
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        message = "prompt: give a text, a list of texts, a list of token ids, or a list of these"
        raise APIError(400, message, "prompt")
    check_number(len(given) * body.n, service)
    found: list[Prompt] = []
    for item in given:
        if isinstance(item, str):
            prompt = Prompt([*bos, *await service.encode(item, "prompt", client)], item)
        else:
            prompt = await run_in_threadpool(_token_prompt, service, item, body.echo)
        found.append(prompt)
        service.check_length(sum(len(x.tokens) for x in found), "prompt")
    return found


def _token_prompt(service: Service, item: Any, is_echoed: bool) -> Prompt:
    """Return a prompt of token ids; clients decide themselves whether bos comes first."""
    if not isinstance(item, list) or not item or any(type(x) is not int for x in item):
        message = "prompt: every entry must be a text or a list of token ids"
        raise APIError(400, message, "prompt")
    service.check_tokens(item, "prompt")
    text = service.tokenizer.decode(item).decode(errors="replace") if is_echoed else ""
    return Prompt(item, text)


def check_scores(n_tokens: int, n_top: int) -> None:
    """Raise APIError if too many log probabilities of prompts are requested."""
    if n_tokens * (1 + n_top) > MAX_SCORES:
        message = (
            f"echo with logprobs={n_top}: the prompts have {n_tokens:,} tokens, but at most "
            f"{MAX_SCORES // (1 + n_top):,} are scored; send fewer at a time"
        )
        raise APIError(400, message, "logprobs")


def check_number(n: int, service: Service) -> None:
    """Raise APIError if a request asks for more texts than can ever be queued."""
    limit = min(MAX_TEXTS, service.engine.max_waiting)
    if n > limit:
        message = f"{n} texts are requested (prompts times n), but at most {limit} are accepted"
        raise APIError(400, message, "n")


@dataclass
class Text:
    """A text that grows by the events of its request, and the log probabilities of its tokens."""

    tokenizer: Tokenizer
    text: str = ""
    """At first the prompt, if it is to be echoed."""
    n_start: int = 0
    """Tokens of the context that the prompt continues."""
    reason: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_new: int = 0
    _scores: list[TokenScore | None] = field(default_factory=list)
    _offset: int = 0

    def add(self, event: Event) -> tuple[str, str | None]:
        """Return the new text, and the reason if it is the last; raise APIError if it failed."""
        if isinstance(event, PromptRead):
            self._scores.extend(event.scores)
            return self.text, None  # the echo
        if isinstance(event, NewToken):
            if event.score is not None:
                self._scores.append(event.score)
            self.text += event.text
            return event.text, None
        check_finished(event)
        self.text += event.text
        self.reason = event.reason
        self.n_prompt, self.n_cached, self.n_new = event.n_prompt, event.n_cached, event.n_new
        return event.text, event.reason

    def new_logprobs(self) -> dict[str, Any]:
        """Return the log probabilities since the last call, in the format of completions."""
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for score in self._scores:
            name = "" if score is None else token_name(self.tokenizer, score.token)
            found["tokens"].append(name)
            found["token_logprobs"].append(None if score is None else score.logprob)
            top = {} if score is None else score.top
            named = {token_name(self.tokenizer, token): x for token, x in top}
            found["top_logprobs"].append(None if score is None else named)
            found["text_offset"].append(self._offset)
            self._offset += len(name)
        self._scores = []
        return found


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; bytes that are not text are written as OpenAI writes them."""
    content = tokenizer.decode([token])
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def usage(texts: Sequence[Text], n: int) -> dict[str, Any]:
    """Return the numbers of tokens; each prompt counts once, whatever n is."""
    n_prompt = sum(text.n_start + text.n_prompt for text in texts[::n])
    n_cached = sum(text.n_start + text.n_cached for text in texts[::n])
    n_new = sum(text.n_new for text in texts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
