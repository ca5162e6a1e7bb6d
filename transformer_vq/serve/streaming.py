"""Streamed responses: server-sent events, one JSON object each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.responses import StreamingResponse

from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Event, Request
from transformer_vq.serve.service import Service

DONE = "data: [DONE]\n\n"
Objects = Callable[[AsyncIterator[tuple[int, Event]]], AsyncIterator[dict[str, Any]]]


async def stream_response(
    service: Service, requests: Sequence[Request], client: HTTPRequest, objects: Objects
) -> StreamingResponse:
    """Return a response that streams the objects made from the events of requests.

    The first object is awaited, so that a request that fails before it has the right status.
    Later errors are sent as an event. The requests are cancelled when the client disconnects.
    """
    stack = AsyncExitStack()
    events = await stack.enter_async_context(service.events(requests, client))
    found = objects(events)
    try:
        first = await anext(found, None)
    except BaseException:
        await stack.aclose()
        raise

    async def content() -> AsyncIterator[str]:
        async with stack:
            try:
                if first is not None:
                    yield _event(first)
                async for item in found:
                    yield _event(item)
            except APIError as error:
                yield _event(error.body)
            yield DONE

    return StreamingResponse(content(), media_type="text/event-stream")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
