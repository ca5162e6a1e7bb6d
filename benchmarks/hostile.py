"""Hostile requests to a server: none of them may hurt another request."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from serving import HOST, connection_to

TIMEOUT = 600.0  # seconds without a byte from the server
IDLE_SECONDS = 20.0  # how long clients that send half a request stay connected
COMPLETIONS, CHAT, CONTEXTS = "/v1/completions", "/v1/chat/completions", "/v1/contexts"
JSON, BINARY = "application/json", "application/octet-stream"

Hostile = Callable[[int], str]
"""Sends something to a port; returns what is wrong with the answer, or an empty string."""


def _sends(
    path: str, body: bytes, *wanted: int, kind: str = JSON, headers: dict[str, str] | None = None
) -> Hostile:
    """Return a request whose answer must have one of these statuses."""

    def send(port: int) -> str:
        with connection_to(port, TIMEOUT) as connection:
            connection.request("POST", path, body, {"Content-Type": kind} | (headers or {}))
            response = connection.getresponse()
            response.read()
        return "" if response.status in wanted else f"{path}: status {response.status}"

    return send


def _completion(*wanted: int, **fields: object) -> Hostile:
    return _sends(COMPLETIONS, json.dumps({"prompt": "x", **fields}).encode(), *wanted)


def _chat(message: dict[str, object], *wanted: int) -> Hostile:
    body = json.dumps({"messages": [{"role": "user", "content": "x"} | message], "max_tokens": 2})
    return _sends(CHAT, body.encode(), *wanted)


def _upload(tensors: dict[str, tuple[str, list[int], bytes]], *wanted: int) -> Hostile:
    """Upload a safetensors file with these tensors: dtype, shape, bytes."""
    header: dict[str, object] = {}
    content = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        content += data
    head = json.dumps(header).encode()
    return _sends(CONTEXTS, struct.pack("<Q", len(head)) + head + content, *wanted, kind=BINARY)


def _idles(content: bytes) -> Hostile:
    """Return a client that sends part of a request and keeps its connection open."""

    def send(port: int) -> str:
        with socket.create_connection((HOST, port), TIMEOUT) as connection:
            connection.sendall(content)
            connection.settimeout(IDLE_SECONDS)
            with suppress(TimeoutError):
                connection.recv(1)
        return ""

    return send


def _leaves(path: str, body: bytes) -> Hostile:
    """Return a client that asks for heavy work and disconnects at once."""

    def send(port: int) -> str:
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: {JSON}\r\n"
        with socket.create_connection((HOST, port), TIMEOUT) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.1)
        return ""

    return send


KINDS: dict[str, Hostile] = {
    "top_p that rounds to 0": _completion(200, top_p=1e-46, max_tokens=2),
    "temperature that overflows": _completion(200, temperature=1e-38, max_tokens=2),
    "upload of 10^9 rows": _upload({"logits": ("F32", [10**9, 0], b"")}, 400),
    "upload of another dtype": _upload({"logits": ("I8", [1, 4096], bytes(4096))}, 400),
    "upload that is not a snapshot": _sends(CONTEXTS, b"\xff" * 1000, 400, kind=BINARY),
    "half a header": _idles(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "),
    "half a body": _idles(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"prompt": '
    ),
    "400,000 prompts": _completion(400, 413, prompt=["x"] * 400_000),
    "400,000 prompts of tokens": _completion(400, 413, prompt=[[1]] * 400_000),
    "document of 20,000,000 numbers": _sends(
        CONTEXTS, b'{"tokens": [' + b"1," * 20_000_000 + b"1]}", 413
    ),
    "10 MB of nested lists": _sends(COMPLETIONS, b'{"prompt": ' + b"[" * 10**7, 400, 413),
    "scores of 16,000 tokens": _completion(
        200, 400, 413, prompt=[1] * 16_000, echo=True, logprobs=20, max_tokens=1
    ),
    "inspection of a departed client": _leaves(
        "/v1/inspect", json.dumps({"tokens": [1] * 4096, "n_codes": 32}).encode()
    ),
    "long prompt of a departed client": _leaves(
        COMPLETIONS, json.dumps({"prompt": [1] * 300_000, "max_tokens": 10}).encode()
    ),
    "Host: [": _sends(COMPLETIONS, b"{}", 400, 403, headers={"Host": "["}),
    "Origin: http://[": _sends(COMPLETIONS, b"{}", 400, 403, headers={"Origin": "http://["}),
    "Host: evil.com@127.0.0.1": _sends(
        COMPLETIONS, b"{}", 400, 403, headers={"Host": "evil.com@127.0.0.1"}
    ),
    "name of 300 characters": _sends(
        CONTEXTS, json.dumps({"text": "x", "name": "n" * 300}).encode(), 400, 422
    ),
    "tool_calls: 5": _chat({"tool_calls": 5}, 400),
    "unknown role": _chat({"role": "root"}, 400),
    "control tokens in a text": _chat({"content": "<|endoftext|>" * 50}, 200, 400),
}


class HostileClients:
    """Sends every kind of hostile request in turn, for any number of threads."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._kinds = itertools.cycle(KINDS.items())
        self._lock = threading.Lock()

    def send(self) -> str:
        """Send the next one; return what is wrong with the answer, or an empty string."""
        with self._lock:
            name, send = next(self._kinds)
        problem = send(self._port)
        return f"{name}: {problem}" if problem else ""
