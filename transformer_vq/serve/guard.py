"""What is checked before a request reaches a route: its origin, the key, and its size."""

from __future__ import annotations

import secrets
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_vq.serve.errors import APIError

OPEN_PATHS = ("/", "/health", "/favicon.ico", "/docs", "/openapi.json")
"""Paths that need no key: the page, documentation, and a check whether the server runs."""
OPEN_PREFIX = "/page/"
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine; pages of other servers on it are other origins."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # a new version of the page is seen at once
)
"""Sent with every response, for browsers."""


class Guard:
    """Middleware that rejects requests of other sites, without the key, or with a large body.

    Browsers let any web page send requests to localhost. So a request that names another origin
    than this server is refused, and so is one for another host name, unless the server was bound to
    a public address.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_bytes: int, hosts: frozenset[str] | None
    ) -> None:
        self._app, self._api_key, self._max_bytes, self._hosts = app, api_key, max_bytes, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["path"], Headers(scope=scope))
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            # What is too large is not read further; the route sees an interrupted request.
            return {"type": "http.disconnect"} if n_bytes > self._max_bytes else message

        async def checked(message: Message) -> None:
            if n_bytes > self._max_bytes:
                return
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        with suppress(ClientDisconnect):
            await self._app(scope, counted, checked)
        if n_bytes > self._max_bytes:
            await self._too_large().response()(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        hosts = self._hosts
        if hosts is not None and _name(host) not in hosts:
            message = f"the host {host!r:.80} is not that of this server; see --allow-hosts"
            raise APIError(403, message)
        origin = headers.get("origin")
        if origin is not None:
            place = urlsplit(origin)
            # A proxy may pass another host name than the one in the address of the page.
            is_allowed = hosts is not None and place.hostname in hosts - LOCAL
            if place.netloc != host and not is_allowed:
                raise APIError(403, f"requests from {origin!r:.80} are not accepted")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        if self._api_key is not None and not is_open:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not secrets.compare_digest(given, self._api_key.encode()):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                raise APIError(401, message, code="invalid_api_key")

    def _too_large(self) -> APIError:
        message = f"the request is larger than {self._max_bytes:,} bytes"
        return APIError(413, message, code="request_too_large")


def _name(host: str) -> str:
    """Return a host without its port."""
    return urlsplit(f"//{host}").hostname or ""
