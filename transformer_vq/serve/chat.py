"""POST /v1/chat/completions: the next message of a conversation, if there is a chat template."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from transformer_vq.data.chat_template import compile_chat_template
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.serve.bodies import body_route
from transformer_vq.serve.completions import Text, check_number, token_name, usage
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Event, NewToken, TokenScore
from transformer_vq.serve.schema import ChatBody, ChatMessage
from transformer_vq.serve.service import Service
from transformer_vq.serve.streaming import stream_response


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=body_route(service.limits.prompt_tokens))

    @router.post("/v1/chat/completions", response_model=None, tags=["generation"])
    async def chat(body: ChatBody, client: HTTPRequest) -> Response:
        """Write the next message. Models without a chat template answer with status 400."""
        service.check_model(body.model)
        max_tokens = service.new_tokens(body.max_completion_tokens or body.max_tokens)
        start = await service.start(body.context)
        prompt = await read_messages(service, body.messages, client)
        if start is None and prompt[:1] != [service.tokenizer.bos]:
            prompt = [service.tokenizer.bos, *prompt]
        service.check_length(len(prompt), "messages")
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


async def read_messages(
    service: Service, messages: list[ChatMessage], client: HTTPRequest
) -> list[int]:
    """Return the prompt of a conversation; raise APIError if there is no template for it.

    Names of special tokens are tokens in the template, and text in the messages.
    """
    if service.chat_template is None:
        message = "this model has no chat template; use /v1/completions"
        raise APIError(400, message, code="no_chat_template")
    special = special_tokens(service.tokenizer)
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    # Divides names in messages while they are rendered; unknown to clients, and without letters,
    # which a template may change.
    mark = str(secrets.randbits(128))
    render = partial(_render, service, service.chat_template, messages, names, mark)
    text = await run_in_threadpool(render)
    tokens: list[int] = []
    for part in re.split(f"({names})", text) if names else [text]:
        if part in special:
            tokens.append(special[part])
        elif part:
            tokens += await service.encode(part.replace(mark, ""), "messages", client)
    return tokens


def _render(
    service: Service, template: str, messages: list[ChatMessage], names: str, mark: str
) -> str:
    """Return the text of a template, with marks inside names of special tokens in messages."""

    def divided(value: Any) -> Any:
        if isinstance(value, dict):
            return {divided(key): divided(x) for key, x in value.items()}
        if isinstance(value, list):
            return [divided(x) for x in value]
        if isinstance(value, str) and names:
            return re.sub(names, lambda name: mark.join(name[0]) + mark, value)
        return value

    named = {token: name for name, token in special_tokens(service.tokenizer).items()}
    eod = service.tokenizer.eod
    try:
        return compile_chat_template(template).render(
            messages=[divided(message.plain()) for message in messages],
            add_generation_prompt=True,
            bos_token=named.get(service.tokenizer.bos, ""),
            eos_token="" if eod is None else named.get(eod, ""),
        )
    except Exception as error:  # whatever a template does with fields that it does not expect
        reason = " ".join(str(error).split())
        message = f"messages: the chat template rejects them: {reason:.200}"
        raise APIError(400, message, "messages") from error


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
