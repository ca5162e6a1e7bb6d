"""A `tvq serve` process for benchmarks, and requests to it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_vq.errors import UserError

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A running server on this machine."""

    port: int
    pid: int


@contextmanager
def serving(run: str, store: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Start `tvq serve` on a free port; stop it at the end.

    Prefixes are not reused, and requests may take any time. store: folder for contexts.
    """
    command = [sys.executable, "-m", "transformer_vq", "serve", run, "--store", str(store)]
    command += ["--port", "0", "--prefix-memory-mb", "0", "--time-limit", "1e6", *options]
    environment = {name: x for name, x in os.environ.items() if name != "TVQ_API_KEY"}
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/", process.stdout.readline())
            if found is None:
                process.wait()
                messages.seek(0)
                said = messages.read().strip().rpartition("\n")[2].removeprefix("tvq: ")
                raise UserError(f"tvq serve {run} did not start: {said or 'no message'}")
            yield Server(int(found.group(1)), process.pid)
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def connection_to(port: int, timeout: float | None = None) -> Iterator[http.client.HTTPConnection]:
    """Yield a connection to a server; close it at the end."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes
) -> http.client.HTTPResponse:
    """Send JSON; return the response, whose body is still to be read."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of a streamed response until its end."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
