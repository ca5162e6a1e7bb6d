"""POST /v1/completions and /v1/chat/completions: as one JSON object, or as a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.serve.guard import BodyRoute
from transformer_vq.serve.requests import Event, Finished, Request, TokenScore
from transformer_vq.serve.schema import APIError, ChatBody, CompletionBody, GenerationBody
from transformer_vq.serve.service import Service


def completions_router(service: Service) -> APIRouter:
    """Return the two routes."""
    router = APIRouter(route_class=BodyRoute, tags=["generation"])

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, client: HTTPRequest) -> Response:
        """Continue one or several prompts."""
        service.check_model(body.model)
        prompts = await service.prompts(client, body.context)
        choices: list[Choice] = []
        for tokens, echo in await prompts.completions(body):
            for request in service.requests(body, tokens, prompts.start, body.logprobs, body.echo):
                choices.append(Choice(service.tokenizer, len(choices), request, echo))
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        return await respond(service, body, client, choices, head)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, client: HTTPRequest) -> Response:
        """Write the next message. Models without a chat template answer with status 400."""
        service.check_model(body.model)
        prompts = await service.prompts(client, body.context)
        n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt = await prompts.messages(body)
        requests = service.requests(body, prompt, prompts.start, n_logprobs)
        choices = [ChatChoice(service.tokenizer, i, x) for i, x in enumerate(requests)]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind}
        return await respond(service, body, client, choices, head)

    return router


class Choice:
    """One text of a response, in the format of completions; its events arrive one by one."""

    def __init__(self, tokenizer: Tokenizer, index: int, request: Request, echo: str = "") -> None:
        self._tokenizer, self._index, self.request, self._echo = tokenizer, index, request, echo
        self._is_new = True
        self._scores: list[TokenScore | None] = []  # those that are not sent yet
        self._offset = 0
        self.end: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._scores.extend(event.scores)
        self.end = event.end

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Take the next event; return the object to stream after it, if any."""
        self.add(event)
        content = self._delta(event.text)
        self._is_new = False
        return self._object(content) if content else None

    def whole(self) -> dict[str, Any]:
        """Return the object of a response that is not streamed, after the last event."""
        assert self.end is not None
        return self._object({"text": self._echo + self.end.text})

    def _delta(self, new: str) -> dict[str, Any]:
        """Return the fields for a new text, if there is something to send."""
        text = self._echo + new if self._is_new else new
        return {"text": text} if text or self.end or self._scores else {}

    def _object(self, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if self.request.n_logprobs is None else self._logprobs()
        self._scores = []
        reason = None if self.end is None else self.end.reason
        return {"index": self._index, "logprobs": logprobs, "finish_reason": reason} | content

    def _logprobs(self) -> dict[str, Any]:
        """Return the new log probabilities."""
        tokens: list[str] = []
        offsets: list[int] = []
        for score in self._scores:
            offsets.append(self._offset)
            tokens.append("" if score is None else token_name(self._tokenizer, score.token))
            self._offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if x is None else x.logprob for x in self._scores],
            "top_logprobs": [
                None if x is None else {token_name(self._tokenizer, t): p for t, p in x.top}
                for x in self._scores
            ],
            "text_offset": offsets,
        }


class ChatChoice(Choice):
    """One message of a response, in the format of chat completions."""

    def whole(self) -> dict[str, Any]:
        assert self.end is not None
        message = {"role": "assistant", "content": self.end.text, "refusal": None}
        return self._object({"message": message})

    def _delta(self, new: str) -> dict[str, Any]:
        role = {"role": "assistant"} if self._is_new else {}
        has_any = new or self.end or self._scores or role
        return {"delta": role | {"content": new}} if has_any else {}

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
    choices: Sequence[Choice],
    head: dict[str, Any],
) -> Response:
    """Answer with the texts of choices: streamed, or all at once. head: fields of every object."""
    head = head | {"created": int(time.time()), "model": service.name}
    events = service.events([choice.request for choice in choices], client)

    async def objects() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(events):
            async for i, event in events:
                if (chunk := choices[i].chunk(event)) is not None:
                    yield head | {"choices": [chunk]}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield head | {"choices": [], "usage": usage(choices, body.n)}

    if body.stream:
        return await stream_response(objects())
    async with aclosing(events):
        async for i, event in events:
            choices[i].add(event)
    found = [choice.whole() for choice in choices]
    return JSONResponse(head | {"choices": found, "usage": usage(choices, body.n)})


async def stream_response(objects: AsyncGenerator[dict[str, Any], None]) -> StreamingResponse:
    """Return a response that streams objects as server-sent events.

    The first object is awaited, so that a request that fails before it has the right status.
    Later errors are sent as an event.
    """
    first = await anext(objects)

    def event(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    async def content() -> AsyncGenerator[str, None]:
        async with aclosing(objects):
            try:
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
    starts = [choice.request.start for choice in choices[::n]]
    n_start = sum(start.n_tokens for start in starts if start is not None)
    ends = [choice.end for choice in choices if choice.end is not None]
    n_prompt = n_start + sum(end.n_prompt for end in ends[::n])
    n_cached = n_start + sum(end.n_cached for end in ends[::n])
    n_new = sum(end.n_new for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
