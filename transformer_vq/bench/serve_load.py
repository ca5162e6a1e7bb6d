"""Load for a server: what clients ask for, and what they see."""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformer_vq.bench.serve_hostile import Attackers
from transformer_vq.bench.serving import connection_to, events, post
from transformer_vq.data.tokenizers import Tokenizer

Outcome = Literal["complete", "cancelled", "rejected", "hostile", "wrong"]

PATH = "/v1/completions"
TIMEOUT = 3600.0  # seconds without a byte from the server
MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": 5}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "unknown": 1}', 400),
    (b'{"prompt": "x", "model": "unknown"}', 404),
    (b'{"prompt": "x", "context": "unknown"}', 404),
)
"""Bodies of bad requests, and the status that they deserve."""


@dataclass(frozen=True)
class Job:
    """One of the requests that clients choose from."""

    number: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int

    def body(self) -> bytes:
        """Return the body of the request."""
        return json.dumps(
            {
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": 1.0,
                "seed": self.seed,
                "stream": True,
            }
        ).encode()


def make_jobs(
    tokens: Sequence[int], tokenizer: Tokenizer, n: int, max_prompt: int, max_tokens: int
) -> list[Job]:
    """Return requests with prompts from a text; lengths are evenly distributed on a log scale."""
    rng = random.Random(0)
    longest = min(max_prompt - 1, len(tokens) - 1)
    jobs = []
    for number in range(n):
        length = round(math.exp(rng.uniform(0, math.log(longest + 1)))) - 1
        start = rng.randrange(len(tokens) - length)
        prompt = [tokenizer.bos, *tokens[start : start + length]]
        n_new = round(math.exp(rng.uniform(0, math.log(max_tokens))))
        temperature = rng.choice([0.0, 0.7, 1.0])
        jobs.append(Job(number, prompt, n_new, temperature, rng.randrange(2**31)))
    return jobs


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request."""

    outcome: Outcome
    job: int | None = None
    text: str = ""
    n_tokens: int = 0
    first_seconds: float = 0.0
    """From the request to its first token."""
    detail: str = ""


@dataclass(frozen=True)
class Choice:
    """What a client does next: a job, which it may cancel, or something malformed or hostile."""

    job: Job | None
    limit: int | None = None
    """The client disconnects after this many events."""
    malformed: tuple[bytes, int] | None = None
    """None for a hostile request, if there is no job either."""


def choices(
    client: int, jobs: Sequence[Job], cancelled: float, malformed: float, hostile: float = 0.0
) -> Iterator[Choice]:
    """Yield what one client does, without end; the same for every call."""
    rng = random.Random(client)
    while True:
        kind = rng.random()
        if kind < malformed:
            yield Choice(None, malformed=rng.choice(MALFORMED))
            continue
        if kind > 1 - hostile:
            yield Choice(None)
            continue
        job = rng.choice(jobs)
        is_cancelled = kind < malformed + cancelled
        yield Choice(job, rng.randint(1, job.max_tokens) if is_cancelled else None)


@dataclass
class Load:
    """Clients that send one request after the other until a time.

    `start` them, and `join` them for what they saw.
    """

    port: int
    jobs: Sequence[Job]
    cancelled: float
    """Share of the requests whose client disconnects before the end."""
    malformed: float
    hostile: float = 0.0
    _seen: list[Seen] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, n_clients: int, seconds: float) -> None:
        """Start all clients; after this time they send no more requests."""
        end = time.monotonic() + seconds
        self._attackers = Attackers(self.port)
        for i in range(n_clients):
            thread = threading.Thread(target=self._client, args=(i, end), daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> list[Seen]:
        """Wait for the responses to all requests; return what all clients saw."""
        for thread in self._threads:
            thread.join()
        return self._seen

    def _client(self, number: int, end: float) -> None:
        for choice in choices(number, self.jobs, self.cancelled, self.malformed, self.hostile):
            if time.monotonic() >= end:
                return
            try:
                found = self._request(choice)
            except (OSError, http.client.HTTPException, ValueError) as error:
                found = Seen("wrong", detail=f"{type(error).__name__}: {error}")
            self._seen.append(found)

    def _request(self, choice: Choice) -> Seen:
        if choice.malformed is not None:
            return self._send_malformed(*choice.malformed)
        if choice.job is None:
            problem = self._attackers.send()
            return Seen("wrong" if problem else "hostile", detail=problem)
        with connection_to(self.port, TIMEOUT) as connection:
            return _stream(connection, choice.job, choice.limit)

    def _send_malformed(self, body: bytes, status: int) -> Seen:
        with connection_to(self.port, TIMEOUT) as connection:
            response = post(connection, PATH, body)
            error = json.loads(response.read())["error"]
        if response.status == status:
            return Seen("rejected")
        return Seen("wrong", detail=f"status {response.status}: {error['message']}")


def _stream(connection: http.client.HTTPConnection, job: Job, limit: int | None) -> Seen:
    """Send a request and read its stream; disconnect after `limit` events, if given."""
    start = time.monotonic()
    response = post(connection, PATH, job.body())
    if response.status != 200:
        detail = f"status {response.status}: {response.read()[:200]!r}"
        return Seen("wrong", job.number, detail=detail)
    text, first = "", 0.0
    for n_events, value in enumerate(events(response), 1):
        if "error" in value:
            return Seen("wrong", job.number, detail=str(value["error"]["message"]))
        first = first or time.monotonic() - start
        (choice,) = value["choices"]
        text += choice["text"]
        if choice["finish_reason"] is not None:
            return Seen("complete", job.number, text, n_events - 1, first)
        if limit is not None and n_events >= limit:
            return Seen("cancelled", job.number, text, n_events, first)
    return Seen("wrong", job.number, detail="the stream is incomplete")
