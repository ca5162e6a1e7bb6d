"""Run the application with uvicorn until a signal, with limits for every connection.

A client has a limited time to send its request, and to read each part of the response. Above the
maximum number of connections, the one that has kept the server waiting for longest is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence

from transformer_vq.errors import EXTRAS, UserError, missing_extra
from transformer_vq.progress import info

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from transformer_vq.serve.app import create_app
    from transformer_vq.serve.guard import LOCAL, host_name, is_local
    from transformer_vq.serve.service import Service
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0].replace("_", "-")
    if package not in EXTRAS:
        raise
    raise missing_extra("tvq serve", package) from error

SECONDS_TO_SEND = 5  # what is left of the responses, after the requests have ended
MIN_RATE = 1000  # bytes per second at which a large request must arrive
MAX_BACKLOG = 1024  # connections that wait to be accepted
OTHER_FILES = 64  # that the process has open, such as those of libraries


class Connection(H11Protocol):
    """An HTTP connection with limits, which a subclass sets."""

    max_connections: int
    client_seconds: float
    _is_aborted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        others = [x for x in self.connections if isinstance(x, Connection) and not x._is_aborted]
        if len(others) > self.max_connections:
            waiting = [x for x in others if x is not self and x._is_waiting()]
            min(waiting, key=lambda x: x._heard, default=self)._abort()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        self._n_bytes += len(data)
        if self._n_bytes >= MIN_RATE * self.client_seconds:
            self._wait()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._wait()
        super().pause_writing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a response was sent already, or is being sent
            self.transport.close()

    def close_if_late(self) -> None:
        """Close the connection if the client has not sent or read enough in time."""
        if self._is_waiting() and time.monotonic() > self._since + self.client_seconds:
            self._abort()

    def _wait(self) -> None:
        """Start to wait for the client: for its request, or until it reads the response."""
        self._since = self._heard = time.monotonic()
        self._n_bytes = 0

    def _is_waiting(self) -> bool:
        is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return is_incomplete or self.flow.write_paused or self.transport.is_closing()

    def _abort(self) -> None:
        self._is_aborted = True
        self.transport.abort()


def limit_connections(max_connections: int) -> tuple[int, int]:
    """Return how many connections the process can have, and how many may wait to be accepted.

    Raises the soft limit of open files as needed. Each connection may need two files: itself and
    one that it downloads. All that wait may be accepted before the first of them is counted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OTHER_FILES + MAX_BACKLOG + 2 * max_connections
    n_files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < n_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard))
    n_free = max(n_files - OTHER_FILES, 4)
    backlog = min(MAX_BACKLOG, n_free // 4)
    return min(max_connections, (n_free - backlog) // 2), backlog


class Server(uvicorn.Server):
    """A server that ends the requests in progress before it closes their connections.

    stop_seconds: time that they have to finish. client_seconds: time that a client has to send a
    request, and to read each part of the response.
    """

    def __init__(
        self,
        service: Service,
        hosts: frozenset[str] | None,
        stop_seconds: float,
        max_connections: int = 1000,
        client_seconds: float = 30.0,
    ) -> None:
        self._service, self._stop_seconds = service, stop_seconds
        n_connections, backlog = limit_connections(max_connections)
        limits = {"max_connections": n_connections, "client_seconds": client_seconds}
        super().__init__(
            uvicorn.Config(
                create_app(service, hosts),
                http=type("LimitedConnection", (Connection,), limits),
                ws="none",
                backlog=backlog,
                log_config=None,
                log_level="error",  # clients can cause warnings as often as they like
                access_log=False,
                timeout_graceful_shutdown=round(stop_seconds) + SECONDS_TO_SEND,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of clients that take too long; called every 0.1 seconds."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish or cancel all requests, so that their responses end, and close."""
        stopping = asyncio.to_thread(self._service.engine.stop, self._stop_seconds)
        ending = asyncio.create_task(stopping)
        await super().shutdown(sockets)
        await ending


def serve(
    service: Service,
    host: str,
    port: int,
    allow_hosts: Sequence[str],
    stop_seconds: float,
    announce: Callable[[str], None],
    client_seconds: float = 30.0,
) -> None:
    """Listen until Ctrl-C or SIGTERM; then finish requests within a time.

    allow_hosts: names that clients may use, such as that of a reverse proxy. announce: receives the
    addresses. client_seconds: see `Server`.
    """
    names = accepted_names(allow_hosts)
    listener = listen(host, port)
    bound, number = listener.getsockname()[:2]
    if is_local(bound):
        names |= LOCAL | accepted_names([bound, host])
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{number}"
    announce(f"{service.name}: page {address}/, API {address}/v1")
    if not is_local(bound) and service.api_key is None:
        info("anyone who can reach this machine can use the model; set --api-key")
    if not names:
        info("requests for any host name are accepted; set --allow-hosts")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    os.umask(0o077)  # contexts hold the documents of clients
    server = Server(service, names or None, stop_seconds, client_seconds=client_seconds)
    server.run(sockets=[listener])


def accepted_names(allow_hosts: Sequence[str]) -> frozenset[str]:
    """Return host names as requests have them; raise UserError if one is not a name."""
    found = {text: host_name(text) or host_name(f"[{text}]") for text in allow_hosts}
    for text, name in found.items():
        if name is None:
            raise UserError(f"--allow-hosts {text!r}: give names such as example.org")
    return frozenset(name for name in found.values() if name is not None)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # now, so that clients can connect as soon as this returns
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or "not an address"
        problem = f"--host {host} --port {port}: {reason.lower()}"
        raise UserError(f"{problem}; use another address or port") from error
    return listener
