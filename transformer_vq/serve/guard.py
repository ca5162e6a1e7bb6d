"""What is checked before a request reaches a route: its origin, the key, and its body.

Starlette's TrustedHostMiddleware checks the host before. Its CORSMiddleware keeps other sites from
reading responses, not from sending requests, and its limit for bodies does not answer with JSON.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_vq.serve.schema import APIError

OPEN_PATHS = ("/", "/health", "/favicon.ico", "/openapi.json")
"""Paths that need no key: the page, the schema, and a check whether the server runs."""
OPEN_PREFIX = "/page/"
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine; pages of other servers on it are other origins."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.IGNORECASE)
"""A name or address, and possibly a port."""
BODIES = 8  # bodies of the largest size that may be in memory at the same time
LARGE = 1 << 16  # bytes above which a body is parsed on another thread, so that others can go on
OTHER_VALUES = 100_000  # values that a body may have besides the tokens of a prompt
MAX_PARTS = 250_000
"""Quotes and brackets of a body. Parsing that many strings, lists or objects takes 0.1 seconds,
during which no other thread can run."""
SNAPSHOT_TYPES = ("application/octet-stream", "application/x-safetensors")
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # a new version of the page is seen at once
)
"""Sent with every response, for browsers."""


class Guard:
    """Middleware that rejects requests of other sites, without the key, or with a large body.

    Browsers let any web page send requests to localhost, so a request that names another origin
    than this server is rejected. hosts: names of this server; None accepts requests for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        max_bytes: int,
        max_values: int,
        hosts: frozenset[str] | None,
    ) -> None:
        self._app, self._api_key = app, api_key
        self._max_bytes, self._max_values = max_bytes, max_values
        # A proxy may pass another host name than the one in the address of the page.
        self._origins = {name for name in hosts or () if not is_local(name)}
        self._held = 0  # bytes of the bodies of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, n_bytes, n_commas, n_parts = Headers(scope=scope), 0, 0, 0
        is_json = media_type(headers) not in ("text/plain", *SNAPSHOT_TYPES)

        async def counted() -> Message:
            nonlocal n_bytes, n_commas, n_parts
            message = await receive()
            body = message.get("body", b"")
            n_new = len(body)
            n_bytes += n_new
            self._held += n_new
            if n_bytes > self._max_bytes:
                raise self._too_large()
            if is_json:
                # All values but the first of a list or object follow a comma, so commas and
                # brackets bound their memory, which can be 30 times that of the body. A string
                # starts with a quote that does not follow a backslash.
                n_commas += body.count(b",")
                n_parts += sum(map(body.count, (b'"', b"[", b"{"))) - body.count(b'\\"')
            for n, limit, name in (
                (n_commas, self._max_values, "commas"),
                (n_parts, MAX_PARTS, "quotes and brackets"),
            ):
                if n > limit:
                    text = f"the body has more than {limit:,} {name}; send less, or text/plain"
                    raise APIError(413, text)
            if n_new and self._held > BODIES * self._max_bytes:
                raise APIError(503, "the server is busy with large requests; try again later")
            return message

        async def extended(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        try:
            error = self._error(scope["path"], headers)
            app = self._app if error is None else error.response()
            await app(scope, counted, extended)
        finally:
            self._held -= n_bytes

    def _error(self, path: str, headers: Headers) -> APIError | None:
        """Return why a request is rejected, if it is."""
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, headers.get("host", "")):
            return APIError(403, f"requests from {origin!r:.80} are not accepted")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            return self._too_large()
        if self._api_key is None or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_equal = secrets.compare_digest(given.strip().encode(), self._api_key.encode())
        if scheme.lower() == "bearer" and is_equal:
            return None
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return APIError(401, message, code="invalid_api_key")

    def _is_own(self, origin: str, host: str) -> bool:
        """Return whether an origin is that of this server."""
        scheme, _, place = origin.lower().partition("://")
        name = host_name(place)
        if scheme not in ("http", "https") or name is None:
            return False
        return place == host.lower() or name in self._origins

    def _too_large(self) -> APIError:
        message = f"the request is larger than {self._max_bytes:,} bytes"
        return APIError(413, message, code="request_too_large")


def media_type(headers: Headers) -> str:
    """Return the type of the body, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def host_name(host: str) -> str | None:
    """Return the name or address in a host header, without its port; None if it is invalid."""
    found = HOST.fullmatch(host)
    return None if found is None else found[1].lower()


def is_local(name: str) -> bool:
    """Return whether a host name or address is that of this machine for itself."""
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class BodyRequest(Request):
    """A request whose JSON body is parsed on another thread if it is large."""

    async def json(self) -> Any:
        """Return the values of the body; raise APIError if it is not valid JSON.

        Numbers are converted by functions in Python, between which other threads can run.
        """
        content = await self.body()
        parse = partial(json.loads, parse_int=lambda x: int(x), parse_float=lambda x: float(x))
        try:
            if len(content) > LARGE:
                return await run_in_threadpool(parse, content)
            return parse(content)
        except (ValueError, RecursionError):
            raise APIError(400, "the body is not valid JSON") from None


class BodyRoute(APIRoute):
    """A route of `BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return handle_parsed
