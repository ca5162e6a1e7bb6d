"""Run the application with uvicorn until a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from transformer_vq.errors import EXTRAS, UserError, missing_extra
from transformer_vq.progress import info

try:
    import uvicorn

    from transformer_vq.serve.app import create_app
    from transformer_vq.serve.guard import LOCAL
    from transformer_vq.serve.service import Service
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0].replace("_", "-")
    if package not in EXTRAS:
        raise
    raise missing_extra("tvq serve", package) from error

BACKLOG = 1024  # connections that wait to be accepted
SECONDS_TO_SEND = 5  # what is left of the responses, after the requests have ended


class Server(uvicorn.Server):
    """A server that ends the requests in progress before it closes their connections.

    stop_seconds: time that they have to finish.
    """

    def __init__(self, service: Service, hosts: frozenset[str] | None, stop_seconds: float) -> None:
        self._service, self._stop_seconds = service, stop_seconds
        super().__init__(
            uvicorn.Config(
                create_app(service, hosts),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=round(stop_seconds) + SECONDS_TO_SEND,
            )
        )

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
) -> None:
    """Listen until Ctrl-C or SIGTERM; then finish requests within a time.

    allow_hosts: other names of a server on this machine only, such as that of a reverse proxy.
    announce: receives the addresses.
    """
    hosts = LOCAL.union(allow_hosts) if host in LOCAL else None
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    announce(f"{service.name}: page {address}/, API {address}/v1, docs {address}/docs")
    if hosts is None and service.api_key is None:
        info("anyone who can reach this machine can use the model; set --api-key")
    Server(service, hosts, stop_seconds).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # now, so that clients can connect as soon as this returns
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or "not an address"
        raise UserError(
            f"--host {host} --port {port}: {reason.lower()}; use another address or port"
        ) from error
    return listener
