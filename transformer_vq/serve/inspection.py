"""The route /v1/inspect: one inspection at a time, and a short queue."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from transformer_vq.generation.inspection import inspect_tokens
from transformer_vq.serve.bodies import body_route
from transformer_vq.serve.completions import token_name
from transformer_vq.serve.engine import QueueFullError
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.schema import MAX_INSPECTED, InspectBody
from transformer_vq.serve.service import Service

MAX_CHARACTERS = 64 * MAX_INSPECTED  # longer texts are rejected before they are encoded
MAX_REQUESTS = 8  # being computed or waiting


def inspection_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["information"], route_class=body_route(MAX_INSPECTED))
    turn = asyncio.Lock()
    n_requests = 0

    @router.post("/v1/inspect")
    async def inspect(body: InspectBody, client: HTTPRequest) -> dict[str, Any]:
        """Look inside: surprisal, codes and division of attention for every token of a text."""
        nonlocal n_requests
        if n_requests >= MAX_REQUESTS:
            raise QueueFullError(f"{n_requests} inspections are waiting")
        n_requests += 1
        try:
            async with turn:
                if await client.is_disconnected():
                    raise APIError(400, "the client disconnected")
                return await _inspect(service, body, client)
        finally:
            n_requests -= 1

    return router


async def _inspect(service: Service, body: InspectBody, client: HTTPRequest) -> dict[str, Any]:
    start = await service.start(body.context)
    tokens = body.tokens
    if tokens is None:
        if len(body.text) > MAX_CHARACTERS:
            raise _too_long(len(body.text), "characters", MAX_CHARACTERS)
        tokens = await service.encode(body.text, "text", client)
        if start is None:
            tokens = [service.tokenizer.bos, *tokens]
    if len(tokens) > MAX_INSPECTED:
        raise _too_long(len(tokens), "tokens", MAX_INSPECTED)
    if not tokens:
        raise APIError(400, "the text is empty; give text or tokens")
    service.check_tokens(tokens, "text" if body.tokens is None else "tokens")

    def work() -> dict[str, Any]:
        context = None if start is None else start.context
        found = inspect_tokens(service.engine.model, tokens, context=context, n_codes=body.n_codes)
        return found.to_dict()

    found = await asyncio.to_thread(work)  # not in the thread pool of all other requests
    names = [token_name(service.tokenizer, token) for token in tokens]
    position = 0 if start is None else start.n_tokens
    return {"position": position, "tokens": tokens, "texts": names} | found


def _too_long(size: int, unit: str, limit: int) -> APIError:
    return APIError(413, f"the text has {size:,} {unit}; at most {limit:,} are shown", "text")
