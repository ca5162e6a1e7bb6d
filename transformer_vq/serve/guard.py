"""What is checked before a request reaches a route: its origin, the key, and its size.

Starlette's TrustedHostMiddleware checks the host before. Its CORSMiddleware does not reject
requests: it keeps other sites from reading responses, not from sending requests.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
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
BODIES = 8
"""Bodies of the largest size that may be in memory at the same time."""
LARGE = 1 << 16
"""Bytes above which a body is parsed on another thread, so that others can go on."""
OTHER_VALUES = 100_000
"""Values that a body may have besides the tokens of a prompt."""
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
        self._held = 0
        """Bytes of the bodies of all requests in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope["path"], headers)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        n_bytes = n_values = 0
        is_json = media_type(headers) not in ("text/plain", *SNAPSHOT_TYPES)
        rejection: APIError | None = None

        async def counted() -> Message:
            nonlocal n_bytes, n_values, rejection
            message = await receive()
            body = message.get("body", b"")
            n_new = len(body)
            n_bytes += n_new
            self._held += n_new
            if n_bytes > self._max_bytes:
                rejection = self._too_large()
            # All values but the first of a list or object follow a comma, so the commas bound the
            # memory of the values, which can be 30 times that of the body.
            elif is_json and (n_values := n_values + body.count(b",")) > self._max_values:
                text = f"the body has more than {self._max_values:,} commas; send less"
                rejection = APIError(413, text)
            elif n_new and self._held > BODIES * self._max_bytes:
                rejection = APIError(503, "the server is busy with large requests; try again later")
            # What is rejected is not read further; the route sees an interrupted request.
            return message if rejection is None else {"type": "http.disconnect"}

        async def checked(message: Message) -> None:
            if rejection is not None:
                return
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        try:
            with suppress(ClientDisconnect):
                await self._app(scope, counted, checked)
        finally:
            self._held -= n_bytes
        if rejection is not None:
            await rejection.response()(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, headers.get("host", "")):
            raise APIError(403, f"requests from {origin!r:.80} are not accepted")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        if self._api_key is not None and not is_open:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_equal = secrets.compare_digest(given.strip().encode(), self._api_key.encode())
            if scheme.lower() != "bearer" or not is_equal:
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                raise APIError(401, message, code="invalid_api_key")

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
        content = await self.body()
        if len(content) > LARGE:
            return await run_in_threadpool(json.loads, content)
        return json.loads(content)


class BodyRoute(APIRoute):
    """A route of `BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return handle_parsed
