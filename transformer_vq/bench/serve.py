"""A server under load: errors, mixed-up texts, memory, and throughput next to the bare engine.

Every text that a client received in full is compared with that of the same request alone.
"""

from __future__ import annotations

import math
import re
import resource
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from transformer_vq.bench.cells import machine
from transformer_vq.bench.serve_load import Job, Load, Seen, choices, make_jobs
from transformer_vq.bench.serve_records import ServeRecord, ServeSettings
from transformer_vq.bench.serving import connection_to, serving
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.errors import UserError
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.snapshot import Snapshots
from transformer_vq.generation.text import TextStream
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import info, progress_bar
from transformer_vq.serve.engine import Engine, check_servable
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Event, Finished, NewToken, Request, Start

MEGABYTE = 1_000_000
SECONDS_PER_SAMPLE = 1.0  # of the memory of the server


def measure(
    run: str, model: TransformerVQ, tokenizer: Tokenizer, text: str, settings: ServeSettings
) -> ServeRecord:
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
        load = Load(server.port, jobs, settings.cancelled, settings.malformed, settings.hostile)
        health = Health(server.port)
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


class Health(Sampler):
    """The seconds until a new connection has the answer of /health."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def _measure(self) -> float:
        start = time.monotonic()
        with connection_to(self._port) as connection:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
        return time.monotonic() - start if response.status == 200 else math.inf

    def summary(self) -> dict[str, float]:
        """Return the median and the longest time."""
        if not self._samples:
            return {}
        return {"median": statistics.median(self._samples), "largest": max(self._samples)}


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
    clients = [
        choices(i, jobs, settings.cancelled, settings.malformed, settings.hostile)
        for i in range(settings.clients)
    ]
    ended = threading.Event()

    def submit(client: int) -> None:
        choice = next(x for x in clients[client] if x.job is not None)
        assert choice.job is not None
        n_events = 0

        def notify(event: Event) -> None:
            nonlocal n_events
            n_events += isinstance(event, NewToken)
            if isinstance(event, Finished):
                if not ended.is_set():
                    submit(client)
            elif n_events == choice.limit:
                generation.cancel()

        generation = engine.submit(_request(choice.job), notify)

    for client in range(settings.clients):
        submit(client)
    engine.start()
    seconds = wait("bare engine", 60 * settings.minutes)
    n_tokens = engine.counters.prompt_tokens + engine.counters.new_tokens
    ended.set()
    engine.stop()
    return n_tokens / seconds


def _engine(model: TransformerVQ, tokenizer: Tokenizer, settings: ServeSettings) -> Engine:
    store = PrefixStore(Snapshots(model), memory_bytes=0)
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
            alone, _ = engine.generate(replace(_request(job), prompt=[], start=Start(context, b"")))
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


def table(record: ServeRecord) -> str:
    """Return a Markdown table."""
    found = record["serve"]
    outcomes = found["outcomes"]
    first = found["first_token_seconds"]
    memory = ", ".join(f"{name} {value:,.0f}" for name, value in found["memory_mb"].items())
    shown = ["", ""] if first["median"] is None else [f"{first[x]:.2f}" for x in ("median", "95%")]
    health = [f"{x:.2f}" for x in found.get("health_seconds", {}).values()]
    rows = [
        ("clients", f"{found['clients']:,}"),
        ("slots", f"{found['slots']:,}"),
        ("minutes", f"{found['minutes']:g}"),
        ("complete texts", f"{outcomes.get('complete', 0):,}"),
        ("cancelled by clients", f"{outcomes.get('cancelled', 0):,}"),
        ("malformed, rejected with the right status", f"{outcomes.get('rejected', 0):,}"),
        ("hostile, answered as they should be", f"{outcomes.get('hostile', 0):,}"),
        ("unexpected errors", f"{outcomes.get('wrong', 0):,}"),
        ("complete texts that differ from the same request alone", f"{found['different_texts']:,}"),
        ("complete texts that differ from a batch of one", f"{found['different_from_single']:,}"),
        ("tokens/s (prompts and texts)", f"{found['tokens_per_second']:,.0f}"),
        ("tokens/s of the bare engine", f"{found['engine_tokens_per_second']:,.0f}"),
        ("share of the bare engine", f"{found['share_of_engine']:.2f}"),
        ("seconds to the first token, prompts up to 2,048 tokens: median / 95%", " / ".join(shown)),
        ("memory of the server in MB", memory),
        ("seconds until /health answers: median / longest", " / ".join(health)),
    ]
    return "\n".join(["| load | result |", "| --- | ---: |", *(f"| {a} | {b} |" for a, b in rows)])
