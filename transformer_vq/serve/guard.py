"""What is checked before a request reaches a route: its origin, the key, and its size."""

from __future__ import annotations

import ipaddress
import re
import secrets
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_vq.serve.errors import APIError

OPEN_PATHS = ("/", "/health", "/favicon.ico", "/docs", "/openapi.json")
"""Paths that need no key: the page, documentation, and a check whether the server runs."""
OPEN_PREFIX = "/page/"
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine; pages of other servers on it are other origins."""
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)
"""The host header: a name or address, and possibly a port."""
BODIES = 8
"""Bodies of the largest size that may be in memory at the same time."""
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
    than this server is rejected, and so is one for a host name that is not in `hosts`. None accepts
    any host name.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_bytes: int, hosts: frozenset[str] | None
    ) -> None:
        self._app, self._api_key, self._max_bytes, self._hosts = app, api_key, max_bytes, hosts
        self._held = 0
        """Bytes of the bodies of all requests in progress."""

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
        rejection: APIError | None = None

        async def counted() -> Message:
            nonlocal n_bytes, rejection
            message = await receive()
            n_new = len(message.get("body", b""))
            n_bytes += n_new
            self._held += n_new
            if n_bytes > self._max_bytes:
                rejection = self._too_large()
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
        host, origin = headers.get("host", ""), headers.get("origin")
        name = host_name(host)
        if name is None and host:
            raise APIError(400, f"the host {host!r:.80} is not a name or address with a port")
        if self._hosts is not None and name not in self._hosts:
            message = f"the host {host!r:.80} is not that of this server; see --allow-hosts"
            raise APIError(403, message)
        if origin is not None and not self._is_own(origin, host):
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
        # A proxy may pass another host name than the one in the address of the page.
        is_allowed = self._hosts is not None and name in self._hosts and not is_local(name)
        return place == host.lower() or is_allowed

    def _too_large(self) -> APIError:
        message = f"the request is larger than {self._max_bytes:,} bytes"
        return APIError(413, message, code="request_too_large")


def host_name(host: str) -> str | None:
    """Return the name or address in a host header, without its port; None if it is invalid."""
    found = HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower()


def is_local(name: str) -> bool:
    """Return whether a host name or address is that of this machine for itself."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
