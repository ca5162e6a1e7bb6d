"""Run the application with uvicorn until a signal."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from transformer_vq.errors import EXTRAS, UserError, missing_extra
from transformer_vq.progress import info

try:
    import uvicorn

    from transformer_vq.serve.app import create_app
    from transformer_vq.serve.connections import (
        Connection,
        connection_type,
        limit_connections,
        log_to_stderr,
    )
    from transformer_vq.serve.guard import LOCAL, host_name, is_local
    from transformer_vq.serve.service import Service
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0].replace("_", "-")
    if package not in EXTRAS:
        raise
    raise missing_extra("tvq serve", package) from error

SECONDS_TO_SEND = 5  # what is left of the responses, after the requests have ended


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
        super().__init__(
            uvicorn.Config(
                create_app(service, hosts),
                http=connection_type(n_connections, client_seconds),
                ws="none",
                backlog=backlog,
                log_config=None,
                log_level="warning",
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
        ending = asyncio.create_task(
            asyncio.to_thread(self._service.engine.stop, self._stop_seconds)
        )
        await super().shutdown(sockets)
        await ending


def serve(
    service: Service,
    host: str,
    port: int,
    allow_hosts: Sequence[str],
    stop_seconds: float,
    announce: Callable[[str], None],
    max_connections: int = 1000,
    client_seconds: float = 30.0,
) -> None:
    """Listen until Ctrl-C or SIGTERM; then finish requests within a time.

    allow_hosts: names that clients may use, such as that of a reverse proxy. announce: receives the
    addresses. The last arguments are those of `Server`.
    """
    names = accepted_names(allow_hosts)
    listener = listen(host, port)
    bound, number = listener.getsockname()[:2]
    if is_local(bound):
        names |= LOCAL | {bound, host.lower()}
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{number}"
    announce(f"{service.name}: page {address}/, API {address}/v1, docs {address}/docs")
    if not is_local(bound) and service.api_key is None:
        info("anyone who can reach this machine can use the model; set --api-key")
    if not names:
        info("requests for any host name are accepted; set --allow-hosts")
    log_to_stderr()
    os.umask(0o077)  # contexts hold the documents of clients
    server = Server(service, names or None, stop_seconds, max_connections, client_seconds)
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
        raise UserError(
            f"--host {host} --port {port}: {reason.lower()}; use another address or port"
        ) from error
    return listener
