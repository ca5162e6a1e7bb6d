"""POST /v1/completions and /v1/chat/completions: as one JSON object, or as a stream of events."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from transformer_vq.data.chat_template import compile_chat_template
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.serve.guard import BodyRoute
from transformer_vq.serve.requests import Event, Finished, NewToken, Prefilled, Request, TokenScore
from transformer_vq.serve.schema import (
    APIError,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)
from transformer_vq.serve.service import Service

MAX_TEXTS = 256  # per request: prompts times n
MAX_SCORES = 100_000  # log probabilities of prompts per request; each takes about 700 bytes


def completions_router(service: Service) -> APIRouter:
    """Return the two routes."""
    router = APIRouter(route_class=BodyRoute, tags=["generation"])

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, client: HTTPRequest) -> Response:
        """Continue one or several prompts."""
        service.check_model(body.model)
        start = await service.open_context(body.context)
        prompts = await read_prompts(service, body, client)
        scores_prompt = body.echo and body.logprobs is not None
        if scores_prompt:
            check_scores(sum(len(tokens) for tokens, _ in prompts) * body.n, body.logprobs or 0)
        requests: list[Request] = []
        choices: list[Choice] = []
        for tokens, text in prompts:
            for request in service.requests(body, tokens, start, body.logprobs, scores_prompt):
                echo = text if body.echo else ""
                choices.append(Choice(service.tokenizer, len(requests), request, echo))
                requests.append(request)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        return await respond(service, body, client, requests, choices, head)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, client: HTTPRequest) -> Response:
        """Write the next message. Models without a chat template answer with status 400."""
        service.check_model(body.model)
        check_number(body.n, service)
        start = await service.open_context(body.context)
        prompt = await read_messages(service, body.messages, client)
        if start is None and prompt[:1] != [service.tokenizer.bos]:
            prompt = [service.tokenizer.bos, *prompt]
        service.check_length(len(prompt), "messages")
        n_top = (body.top_logprobs or 0) if body.logprobs else None
        requests = service.requests(body, prompt, start, n_top)
        choices = [ChatChoice(service.tokenizer, i, x) for i, x in enumerate(requests)]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind}
        return await respond(service, body, client, requests, choices, head)

    return router


# Responses


class Choice:
    """One text of a response, in the format of completions; its events arrive one by one."""

    def __init__(self, tokenizer: Tokenizer, index: int, request: Request, echo: str = "") -> None:
        self._tokenizer, self._index, self._echo = tokenizer, index, echo
        self._has_scores = request.n_logprobs is not None
        self.n_start = 0 if request.start is None else request.start.n_tokens
        self._scores: list[TokenScore | None] = []
        """Those that are not sent yet."""
        self._offset = 0
        self.finished: Finished | None = None

    def add(self, event: Event) -> str:
        """Take the next event and return the new text."""
        if isinstance(event, Prefilled):
            self._scores.extend(event.scores)
            return self._echo
        if isinstance(event, NewToken):
            if event.score is not None:
                self._scores.append(event.score)
            return event.text
        self.finished = event
        return event.rest

    def chunk(self, new: str) -> dict[str, Any] | None:
        """Return the object to stream after an event with a new text, if any."""
        if not (new or self.finished or self._scores):
            return None
        return self._object({"text": new})

    def whole(self) -> dict[str, Any]:
        """Return the object of a response that is not streamed, after the last event."""
        assert self.finished is not None
        return self._object({"text": self._echo + self.finished.text})

    def _object(self, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs() if self._has_scores else None
        self._scores = []
        reason = None if self.finished is None else self.finished.reason
        return {"index": self._index, "logprobs": logprobs, "finish_reason": reason} | content

    def _logprobs(self) -> dict[str, Any]:
        """Return the new log probabilities."""
        rows: list[tuple[Any, ...]] = []
        for score in self._scores:
            name = "" if score is None else token_name(self._tokenizer, score.token)
            if score is None:
                rows.append((name, None, None, self._offset))
            else:
                top = {token_name(self._tokenizer, token): x for token, x in score.top}
                rows.append((name, score.logprob, top, self._offset))
            self._offset += len(name)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}


class ChatChoice(Choice):
    """One message of a response, in the format of chat completions."""

    _is_new = True

    def chunk(self, new: str) -> dict[str, Any] | None:
        if not (new or self.finished or self._scores or self._is_new):
            return None
        role = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        return self._object({"delta": role | {"content": new}})

    def whole(self) -> dict[str, Any]:
        assert self.finished is not None
        message = {"role": "assistant", "content": self.finished.text, "refusal": None}
        return self._object({"message": message})

    def _logprobs(self) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = list(self._tokenizer.decode([token]))
            name = token_name(self._tokenizer, token)
            return {"token": name, "logprob": logprob, "bytes": content}

        content = [
            entry(score.token, score.logprob) | {"top_logprobs": [entry(*x) for x in score.top]}
            for score in self._scores
            if score is not None
        ]
        return {"content": content, "refusal": None}


async def respond(
    service: Service,
    body: GenerationBody,
    client: HTTPRequest,
    requests: Sequence[Request],
    choices: Sequence[Choice],
    head: dict[str, Any],
) -> Response:
    """Answer with the texts of requests: streamed, or all at once. head: fields of every object."""
    head = head | {"created": int(time.time()), "model": service.name}
    stack = AsyncExitStack()
    events = await stack.enter_async_context(service.events(requests, client))

    async def objects() -> AsyncIterator[dict[str, Any]]:
        async for i, event in events:
            chunk = choices[i].chunk(choices[i].add(event))
            if chunk is not None:
                yield head | {"choices": [chunk]}
        if body.includes_usage:
            yield head | {"choices": [], "usage": usage(choices, body.n)}

    if body.stream:
        return await stream_response(objects(), stack)
    async with stack:
        async for i, event in events:
            choices[i].add(event)
    found = [choice.whole() for choice in choices]
    return JSONResponse(head | {"choices": found, "usage": usage(choices, body.n)})


async def stream_response(
    objects: AsyncIterator[dict[str, Any]], stack: AsyncExitStack
) -> StreamingResponse:
    """Return a response that streams objects as server-sent events, and closes the stack.

    The first object is awaited, so that a request that fails before it has the right status.
    Later errors are sent as an event.
    """
    try:
        first = await anext(objects, None)
    except BaseException:
        await stack.aclose()
        raise

    def event(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    async def content() -> AsyncIterator[str]:
        async with stack:
            try:
                if first is not None:
                    yield event(first)
                async for item in objects:
                    yield event(item)
            except APIError as error:
                yield event(error.body)
            yield "data: [DONE]\n\n"

    return StreamingResponse(content(), media_type="text/event-stream")


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; bytes that are not text are written as OpenAI writes them."""
    content = tokenizer.decode([token])
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Return the numbers of tokens; each prompt counts once, whatever n is."""
    ends = [choice.finished for choice in choices if choice.finished is not None]
    n_start = sum(choice.n_start for choice in choices[::n])
    n_prompt = n_start + sum(end.n_prompt for end in ends[::n])
    n_cached = n_start + sum(end.n_cached for end in ends[::n])
    n_new = sum(end.n_new for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


# Prompts


async def read_prompts(
    service: Service, body: CompletionBody, client: HTTPRequest
) -> list[tuple[list[int], str]]:
    """Return the tokens of prompts, starting with bos, and their texts.

    Raises APIError if they are of other types, or too many.
    """
    given = body.prompt
    bos = [] if body.context is not None else [service.tokenizer.bos]
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        message = "prompt: give a text, a list of texts, a list of token ids, or a list of these"
        raise APIError(400, message, "prompt")
    check_number(len(given) * body.n, service)

    def read_tokens(item: Any) -> str:
        """Check a prompt of token ids, which has bos if the client wants it; return its text."""
        if not isinstance(item, list) or not item or any(type(x) is not int for x in item):
            message = "prompt: every entry must be a text or a list of token ids"
            raise APIError(400, message, "prompt")
        service.check_tokens(item, "prompt")
        return service.tokenizer.decode(item).decode(errors="replace") if body.echo else ""

    found: list[tuple[list[int], str]] = []
    for item in given:
        if isinstance(item, str):
            found.append((bos + await service.encode(item, "prompt", client), item))
        else:
            found.append((item, await run_in_threadpool(read_tokens, item)))
        service.check_length(sum(len(tokens) for tokens, _ in found), "prompt")
    return found


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


async def read_messages(
    service: Service, messages: list[ChatMessage], client: HTTPRequest
) -> list[int]:
    """Return the prompt of a conversation; raise APIError if there is no template for it.

    Names of special tokens are tokens in the template, and text in the messages.
    """
    if service.chat_template is None:
        message = "this model has no chat template; use /v1/completions"
        raise APIError(400, message, code="no_chat_template")
    special: dict[str, int] = getattr(service.tokenizer, "special_tokens", {})
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    # Divides names in messages while they are rendered; unknown to clients, and without letters,
    # which a template may change.
    mark = str(secrets.randbits(128))

    def divided(value: Any) -> Any:
        if isinstance(value, dict):
            return {divided(key): divided(x) for key, x in value.items()}
        if isinstance(value, list):
            return [divided(x) for x in value]
        if isinstance(value, str) and names:
            return re.sub(names, lambda name: mark.join(name[0]) + mark, value)
        return value

    def render(template: str) -> str:
        named: dict[int | None, str] = {token: name for name, token in special.items()}
        try:
            return compile_chat_template(template).render(
                messages=[divided(message.plain()) for message in messages],
                add_generation_prompt=True,
                bos_token=named.get(service.tokenizer.bos, ""),
                eos_token=named.get(service.tokenizer.eod, ""),
            )
        except Exception as error:  # whatever a template does with fields that it does not expect
            reason = " ".join(str(error).split())
            message = f"messages: the chat template rejects them: {reason:.200}"
            raise APIError(400, message, "messages") from error

    text = await run_in_threadpool(render, service.chat_template)
    tokens: list[int] = []
    for part in re.split(f"({names})", text) if names else [text]:
        if part in special:
            tokens.append(special[part])
        elif part:
            tokens += await service.encode(part.replace(mark, ""), "messages", client)
    return tokens
