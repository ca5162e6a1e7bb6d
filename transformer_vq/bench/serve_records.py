"""Settings and record of `tvq bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from transformer_vq.bench.records import Machine


@dataclass(frozen=True)
class ServeSettings:
    """What the clients do."""

    clients: int = 64
    """Clients that stream at the same time."""
    slots: int = 8
    """Slots of the server."""
    minutes: float = 10.0
    """Duration of the load."""
    requests: int = 100
    """Number of different requests that clients choose from."""
    max_prompt: int = 200_000
    """Longest prompt in tokens; lengths are evenly distributed on a log scale."""
    max_tokens: int = 200
    """Most new tokens per request; evenly distributed on a log scale."""
    cancelled: float = 0.1
    """Share of the requests that are cancelled by their client."""
    malformed: float = 0.05
    """Share of the requests that are malformed."""
    hostile: float = 0.0
    """Share of the requests that try to hurt others, each kind in turn."""


class ServeRecord(TypedDict):
    """The result of a load."""

    what: str
    machine: Machine
    serve: dict[str, Any]
