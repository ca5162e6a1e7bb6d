"""POST /v1/chat/completions: the next message of a conversation, if there is a chat template."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.serve.completions import Text, check_number, token_name, usage
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Event, NewToken, TokenScore
from transformer_vq.serve.schema import ChatBody, ChatMessage
from transformer_vq.serve.service import Service
from transformer_vq.serve.streaming import stream_response


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, tags=["generation"])
    async def chat(body: ChatBody, client: HTTPRequest) -> Response:
        """Write the next message. Models without a chat template answer with status 400."""
        service.check_model(body.model)
        max_tokens = service.new_tokens(body.max_completion_tokens or body.max_tokens)
        start = await service.start(body.context)
        text = render(service, body.messages)
        prompt = await encode_special(service, text)
        if start is None and prompt[:1] != [service.tokenizer.bos]:
            prompt = [service.tokenizer.bos, *prompt]
        service.check_tokens(prompt, "messages")
        check_number(body.n, service)
        seed, n_top = service.seed(body), (body.top_logprobs or 0) if body.logprobs else None
        requests = [
            service.request(
                body, prompt, max_tokens, seed=seed, sample=i, start=start, n_logprobs=n_top
            )
            for i in range(body.n)
        ]
        n_start = 0 if start is None else start.n_tokens
        texts = [Text(service.tokenizer, n_start=n_start) for _ in requests]
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.name,
        }

        async def stream(events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[dict[str, Any]]:
            is_new = [True] * body.n
            async for i, event in events:
                new, reason = texts[i].add(event)
                delta = {"role": "assistant"} if is_new[i] else {}
                score = event.score if isinstance(event, NewToken) else None
                if new or reason or delta or score:
                    is_new[i] = False
                    delta |= {"content": new}
                    logprobs = _logprobs(service, [score]) if score else None
                    choice = {
                        "index": i,
                        "delta": delta,
                        "logprobs": logprobs,
                        "finish_reason": reason,
                    }
                    yield head | {"choices": [choice]}
            if body.includes_usage:
                yield head | {"choices": [], "usage": usage(texts, body.n)}

        if body.stream:
            return await stream_response(service, requests, client, stream)
        scores: list[list[TokenScore]] = [[] for _ in requests]
        async with service.events(requests, client) as events:
            async for i, event in events:
                texts[i].add(event)
                if isinstance(event, NewToken) and event.score is not None:
                    scores[i].append(event.score)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": x.text, "refusal": None},
                "logprobs": _logprobs(service, scores[i]) if body.logprobs else None,
                "finish_reason": x.reason,
            }
            for i, x in enumerate(texts)
        ]
        return JSONResponse(head | {"choices": choices, "usage": usage(texts, body.n)})

    return router


def render(service: Service, messages: list[ChatMessage]) -> str:
    """Return the prompt of a conversation; raise APIError if there is no template for it."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if service.chat_template is None:
        message = "this model has no chat template; use /v1/completions"
        raise APIError(400, message, code="no_chat_template")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    names = {token: name for name, token in special_tokens(service.tokenizer).items()}
    eod = service.tokenizer.eod
    try:
        return environment.from_string(service.chat_template).render(
            messages=[message.plain() for message in messages],
            add_generation_prompt=True,
            bos_token=names.get(service.tokenizer.bos, ""),
            eos_token="" if eod is None else names.get(eod, ""),
        )
    except TemplateError as error:
        raise APIError(400, f"messages: the chat template rejects them: {error}") from error


async def encode_special(service: Service, text: str) -> list[int]:
    """Return the tokens of a rendered template, in which names of special tokens are tokens."""
    special = special_tokens(service.tokenizer)
    tokens: list[int] = []
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    for part in re.split(f"({names})", text) if names else [text]:
        if part in special:
            tokens.append(special[part])
        elif part:
            tokens.extend(await service.encode(part, "messages"))
    return tokens


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that a template may write, by name."""
    found: dict[str, int] = getattr(tokenizer, "special_tokens", {})
    return found


def _logprobs(service: Service, scores: list[TokenScore]) -> dict[str, Any]:
    """Return log probabilities in the format of chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = service.tokenizer.decode([token])
        name = token_name(service.tokenizer, token)
        return {"token": name, "logprob": logprob, "bytes": list(content)}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(*x) for x in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}
