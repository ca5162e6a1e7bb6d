"""JSON bodies, parsed within a limit; large ones on another thread, so that others can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from fastapi.routing import APIRoute

LARGE = 1 << 16  # bytes
OTHER_VALUES = 100_000  # besides the tokens of a prompt


def check_values(content: bytes, prompt_tokens: int) -> None:
    """Reject a body with more values than a prompt may have tokens, before it is parsed.

    All values but the first of a list or object follow a comma, so their number bounds the memory
    of the values, which can be 30 times that of the body.
    """
    limit = prompt_tokens + OTHER_VALUES
    if content.count(b",") > limit:
        raise HTTPException(413, f"the body has more than {limit:,} commas; send less")


def body_route(prompt_tokens: int) -> type[APIRoute]:
    """Return a class of routes that reject bodies with more values than a prompt has tokens."""

    def parse(content: bytes) -> Any:
        check_values(content, prompt_tokens)
        return json.loads(content)

    class BodyRequest(Request):
        async def json(self) -> Any:
            content = await self.body()
            if len(content) > LARGE:
                return await run_in_threadpool(parse, content)
            return parse(content)

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_parsed(request: Request) -> Response:
                return await handle(BodyRequest(request.scope, request.receive))

            return handle_parsed

    return BodyRoute
