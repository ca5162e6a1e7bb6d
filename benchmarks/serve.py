"""A server under load: errors, mixed-up texts, memory, and throughput next to the bare engine.

Every text that a client received in full is compared with that of the same request alone.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import resource
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro

from common import Output, Record, check_positive, main
from hostile import HostileClients
from measure import machine
from serving import connection_to, events, post, serving
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.errors import UserError
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.text import TextStream
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import info, progress_bar
from transformer_vq.serve.engine import Engine, check_servable
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Event, Request, Start
from transformer_vq.training.loading import load_model_and_tokenizer


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
    """Share of the requests that are hostile, of all kinds in turn; see hostile.py."""


MEGABYTE = 1_000_000


SECONDS_PER_SAMPLE = 1.0  # of the memory and the health of the server


def measure(
    run: str, model: TransformerVQ, tokenizer: Tokenizer, text: str, settings: ServeSettings
) -> Record:
    """Start a server for a run, put load on it, and compare it with the bare engine.

    model, tokenizer: those of the run. text: what prompts are taken from.
    """
    check_servable(model)
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise UserError("the text for prompts is too short; give a longer one")
    jobs = make_jobs(tokens, tokenizer, settings.requests, settings.max_prompt, settings.max_tokens)
    options = ["--slots", str(settings.slots), "--queue", str(4 * settings.clients)]
    with (
        tempfile.TemporaryDirectory() as store,
        serving(run, Path(store), options) as server,
    ):
        memory = Memory(server.pid)
        health = Health(server.port)
        load = Load(server.port, jobs, settings)
        memory.start()
        health.start()
        load.start(settings.clients, 60 * settings.minutes)
        seconds = wait("load", 60 * settings.minutes)
        # What is still in progress now is completed, but not part of the rate.
        n_tokens = served_tokens(server.port)
        memory.stop()
        health.stop()
        info("waiting for the last responses")
        seen = load.join()
    counts = Counter(x.outcome for x in seen)
    rate = n_tokens / seconds
    engine_rate = bare_engine(model, tokenizer, jobs, settings)
    mixed, rounded = different_texts(model, tokenizer, jobs, seen, settings)
    short = sorted(
        x.first_seconds
        for x in seen
        if x.outcome == "complete" and x.job is not None and len(jobs[x.job].prompt) <= 2048
    )
    return {
        "what": "a server under load",
        "machine": machine(torch.device("cpu")),
        "serve": asdict(settings)
        | {
            "model": run,
            "parameters": sum(x.numel() for x in model.parameters()),
            "seconds": seconds,
            "outcomes": dict(counts),
            "errors": sorted({x.detail for x in seen if x.outcome == "wrong"})[:10],
            "different_texts": mixed,
            "different_from_single": rounded,
            "tokens_per_second": rate,
            "engine_tokens_per_second": engine_rate,
            "share_of_engine": rate / engine_rate,
            "first_token_seconds": {
                "median": short[len(short) // 2] if short else None,
                "95%": short[int(0.95 * len(short))] if short else None,
            },
            "memory_mb": memory.summary(),
            "health_seconds": health.summary(),
        },
    }


def wait(title: str, seconds: float) -> float:
    """Sleep with a progress bar; return the seconds that have passed."""
    start, shown = time.monotonic(), 0
    with progress_bar(title, round(seconds), "s") as advance:
        while (left := start + seconds - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            passed = round(time.monotonic() - start)
            advance(passed - shown)
            shown = passed
    return time.monotonic() - start


class Sampler(ABC):
    """Takes a sample every second in the background."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._ended = threading.Event()

    @abstractmethod
    def _measure(self) -> float: ...

    def start(self) -> None:
        """Start to sample."""
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop to sample."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SECONDS_PER_SAMPLE):
            self._samples.append(self._measure())


class Memory(Sampler):
    """The resident memory of a process in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._path = Path(f"/proc/{pid}/statm")

    def _measure(self) -> float:
        pages = int(self._path.read_text().split()[1])
        return pages * resource.getpagesize() / MEGABYTE

    def summary(self) -> dict[str, float]:
        """Return the memory at a quarter, half and the end of the load, and the largest."""
        if not self._samples:
            return {}
        n = len(self._samples)
        named = {"quarter": n // 4, "half": n // 2, "end": n - 1}
        found = {name: round(self._samples[i], 1) for name, i in named.items()}
        return found | {"largest": round(max(self._samples), 1)}


class Health(Sampler):
    """The seconds until a new connection has the answer of /health."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def _measure(self) -> float:
        start = time.monotonic()
        with connection_to(self._port, TIMEOUT) as connection:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
        return time.monotonic() - start if response.status == 200 else math.inf

    def summary(self) -> dict[str, float]:
        """Return the median and the longest time."""
        if not self._samples:
            return {}
        return {"median": median(self._samples), "largest": max(self._samples)}


def served_tokens(port: int) -> int:
    """Return the tokens of prompts and texts that a server has processed since its start."""
    with connection_to(port) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.findall(r"^tvq_(?:prompt|generated)_tokens_total (\S+)$", text, re.MULTILINE)
    return round(sum(float(x) for x in found))


def bare_engine(
    model: TransformerVQ, tokenizer: Tokenizer, jobs: Sequence[Job], settings: ServeSettings
) -> float:
    """Return tokens per second of the engine alone, given the same requests for the same time.

    Requests that a client would cancel are cancelled; malformed and hostile ones are left out.
    """
    engine = _engine(model, tokenizer, settings)
    clients = [choices(i, jobs, settings) for i in range(settings.clients)]
    ended = threading.Event()

    def submit(client: int) -> None:
        choice = next(x for x in clients[client] if x.job is not None)
        assert choice.job is not None
        n_tokens = -1  # the first event follows the prompt

        def notify(event: Event) -> None:
            nonlocal n_tokens
            n_tokens += 1
            if event.end is not None:
                if not ended.is_set():
                    submit(client)
            elif n_tokens == choice.limit:
                generation.cancel()

        generation = engine.submit(_request(choice.job), notify)

    for client in range(settings.clients):
        submit(client)
    engine.start()
    seconds = wait("bare engine", 60 * settings.minutes)
    n_tokens = engine.metrics.total("prompt_tokens") + engine.metrics.total("generated_tokens")
    ended.set()
    engine.stop()
    return n_tokens / seconds


def _engine(model: TransformerVQ, tokenizer: Tokenizer, settings: ServeSettings) -> Engine:
    store = PrefixStore(memory_bytes=0)
    return Engine(model, tokenizer, store, settings.slots, 2 * settings.clients)


def _request(job: Job) -> Request:
    return Request(job.prompt, job.max_tokens, Sampling(job.temperature), job.seed)


def different_texts(
    model: TransformerVQ,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    seen: Sequence[Seen],
    settings: ServeSettings,
) -> tuple[int, int]:
    """Return how many complete texts differ from those of the same requests alone.

    First, alone in an engine with as many slots; second, in a batch of one, as `tvq sample` does:
    products of other sizes round differently, and a key between two codes may get the other one.
    """
    texts: dict[int, list[str]] = {}
    for x in seen:
        if x.outcome == "complete" and x.job is not None:
            texts.setdefault(x.job, []).append(x.text)
    n_wrong, n_rounded = 0, 0
    engine = _engine(model, tokenizer, settings)
    engine.start()
    with progress_bar("solo runs", len(texts), "texts") as advance:
        for number, found in texts.items():
            job = jobs[number]
            context = prefill(model, [job.prompt])
            request = replace(_request(job), prompt=[], start=Start(context, b""))
            alone = engine.generate(request).text
            single = single_text(model, tokenizer, job, context)
            n_wrong += sum(text != alone for text in found)
            n_rounded += sum(text != single for text in found)
            if alone != single or {alone} != set(found):
                info(f"request {number} differs: {len(job.prompt):,} tokens of prompt")
            advance(1)
    engine.stop()
    return n_wrong, n_rounded


def single_text(model: TransformerVQ, tokenizer: Tokenizer, job: Job, context: Context) -> str:
    """Return the text of a request in a batch of one. context: that of its prompt."""
    stop = () if tokenizer.eod is None else (tokenizer.eod,)
    text, made = TextStream(tokenizer), ""
    steps = stream(model, context, job.max_tokens, Sampling(job.temperature), job.seed, stop)
    for (token,) in steps:
        if token is not None and token not in stop:
            made += text.push(token)
    return made + text.end()


def table(record: Record) -> str:
    """Return a Markdown table."""
    found = record["serve"]
    outcomes = found["outcomes"]
    first = found["first_token_seconds"]
    memory = ", ".join(f"{name} {value:,.0f}" for name, value in found["memory_mb"].items())
    shown = ["", ""] if first["median"] is None else [f"{first[x]:.2f}" for x in ("median", "95%")]
    rows = [
        ("clients", f"{found['clients']:,}"),
        ("slots", f"{found['slots']:,}"),
        ("minutes", f"{found['minutes']:g}"),
        ("complete texts", f"{outcomes.get('complete', 0):,}"),
        ("cancelled by clients", f"{outcomes.get('cancelled', 0):,}"),
        ("malformed, rejected with the right status", f"{outcomes.get('rejected', 0):,}"),
        ("unexpected errors", f"{outcomes.get('wrong', 0):,}"),
        ("complete texts that differ from the same request alone", f"{found['different_texts']:,}"),
        ("complete texts that differ from a batch of one", f"{found['different_from_single']:,}"),
        ("tokens/s (prompts and texts)", f"{found['tokens_per_second']:,.0f}"),
        ("tokens/s of the bare engine", f"{found['engine_tokens_per_second']:,.0f}"),
        ("share of the bare engine", f"{found['share_of_engine']:.2f}"),
        ("seconds to the first token, prompts up to 2,048 tokens: median / 95%", " / ".join(shown)),
        ("memory of the server in MB", memory),
    ]
    if "health_seconds" in found:
        health = " / ".join(f"{x:.2f}" for x in found["health_seconds"].values())
        rows.append(("hostile, answered as they should be", f"{outcomes.get('hostile', 0):,}"))
        rows.append(("seconds until /health answers: median / largest", health))
    return "\n".join(["| load | result |", "| --- | ---: |", *(f"| {a} | {b} |" for a, b in rows)])


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


def choices(client: int, jobs: Sequence[Job], settings: ServeSettings) -> Iterator[Choice]:
    """Yield what one client does, without end; the same for every call."""
    rng = random.Random(client)
    while True:
        kind = rng.random()
        if kind < settings.malformed:
            yield Choice(None, malformed=rng.choice(MALFORMED))
            continue
        if kind > 1 - settings.hostile:
            yield Choice(None)
            continue
        job = rng.choice(jobs)
        is_cancelled = kind < settings.malformed + settings.cancelled
        yield Choice(job, rng.randint(1, job.max_tokens) if is_cancelled else None)


@dataclass
class Load:
    """Clients that send one request after the other until a time.

    `start` them, and `join` them for what they saw.
    """

    port: int
    jobs: Sequence[Job]
    settings: ServeSettings
    _seen: list[Seen] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._hostile = HostileClients(self.port)

    def start(self, n_clients: int, seconds: float) -> None:
        """Start all clients; after this time they send no more requests."""
        end = time.monotonic() + seconds
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
        for choice in choices(number, self.jobs, self.settings):
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
            problem = self._hostile.send()
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


@dataclass(frozen=True, kw_only=True)
class Options(ServeSettings, Output):
    """Put load on `tvq serve`: errors, mixed-up texts, memory, and tokens/s.

    Many clients stream completions of prompts from a text; some disconnect, some send malformed or
    hostile requests. Every text is compared with that of the same request alone, and the throughput
    with that of the engine without HTTP. Prefixes are not reused.
    """

    model: tyro.conf.Positional[str]
    """Run folder, or books, the model in the package."""
    text: Path
    """UTF-8 text file that prompts are taken from."""


def measure_options(options: Options) -> Record:
    """Put load on a server for the model of the options."""
    shares = (options.cancelled, options.malformed, options.hostile)
    if min(shares) < 0 or sum(shares) > 1:
        raise UserError("--cancelled, --malformed and --hostile must be shares of at most 1 in all")
    names = [field.name for field in fields(ServeSettings)]
    settings = ServeSettings(**{name: getattr(options, name) for name in names})
    may_be_zero = ("cancelled", "malformed", "hostile")
    check_positive(**{x: n for x, n in vars(settings).items() if x not in may_be_zero})
    model, tokenizer = load_model_and_tokenizer(options.model)
    text = options.text.read_text("utf-8", errors="replace")
    return measure(options.model, model, tokenizer, text, settings)


if __name__ == "__main__":
    main(Options, measure_options, table)
