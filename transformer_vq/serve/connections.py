"""Connections of clients that may be slow, silent, or too many, and a log that they cannot flood.

A client has a limited time to send its request, and to read each part of the response. Above the
maximum number of connections, the one that has kept the server waiting for longest is closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MIN_RATE = 1000  # bytes per second at which a large request must arrive
MAX_BACKLOG = 1024  # connections that wait to be accepted
OTHER_FILES = 64  # that the process has open, such as those of libraries
SAME_MESSAGES = 10  # per minute
MINUTE = 60.0


class Connection(H11Protocol):
    """An HTTP connection with limits; `connection_type` sets them."""

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


def connection_type(max_connections: int, client_seconds: float) -> type[Connection]:
    """Return the protocol with these limits, for uvicorn."""
    limits = {"max_connections": max_connections, "client_seconds": client_seconds}
    return type("LimitedConnection", (Connection,), limits)


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


class RepeatFilter(logging.Filter):
    """Drops the messages of a line of code that has logged many within a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno
        begin, n = self._seen.get(place, (record.created, 0))
        if record.created > begin + MINUTE:
            begin, n = record.created, 0
        self._seen[place] = begin, n + 1
        if n + 1 == SAME_MESSAGES:
            record.msg = f"{record.msg} (more of these are not shown for a minute)"
        return n < SAME_MESSAGES


def log_to_stderr() -> None:
    """Send the log of all libraries to stderr, without floods of the same message."""
    handler = logging.StreamHandler()
    handler.addFilter(RepeatFilter())
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[handler])
