"""Time to the first token of a very long document, through the server, next to GPT-2.

Documents are sent as token ids: every length is exact, and the same tokens are the prompt and the
stored context. So the time does not include the tokenizer.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from transformer_vq.bench.cells import (
    Interrupted,
    check_limits,
    machine,
    median_seconds,
)
from transformer_vq.bench.first_token_baseline import baseline_rows
from transformer_vq.bench.first_token_records import (
    BaselineRow,
    FirstTokenRecord,
    ServedRow,
    ServedTiming,
)
from transformer_vq.bench.records import Failure
from transformer_vq.bench.serving import connection_to, events, post, serving
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import free_memory
from transformer_vq.errors import UserError
from transformer_vq.memory_use import peak_bytes_of
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import Advance, progress_bar
from transformer_vq.serve.engine import check_servable

QUESTION = "\n\nWhat happened at the beginning of the story?\n\n"
BYTES_PER_TOKEN = 12  # of JSON: digits, a comma and a space
STAGES = 4  # of a length: prompt, upload, stored context, restart


class RequestError(RuntimeError):
    """A request that did not get the expected response."""


def measure(
    run: str,
    model: TransformerVQ,
    tokenizer: Tokenizer,
    text: str,
    lengths: Sequence[int],
    gpt2_lengths: Sequence[int],
    *,
    time_limit: float = 3600.0,
    memory_gb: float | None = None,
    device: torch.device | None = None,
) -> FirstTokenRecord:
    """Measure documents of all lengths through a server, then GPT-2.

    model, tokenizer: those of the run. text: what documents are made of. time_limit, memory_gb:
    limits of GPT-2; by default the memory that is free. Raises Interrupted on Ctrl-C.
    """
    check_servable(model)
    device = device or torch.device("cpu")
    tokens = tokenizer.encode(text)
    if not tokens:
        raise UserError("the text for documents is empty; give a longer one")
    memory_gb = free_memory(device) / 1e9 if memory_gb is None else memory_gb
    check_limits(time_limit=time_limit, memory_gb=memory_gb)
    lengths, gpt2_lengths = sorted(set(lengths)), sorted(set(gpt2_lengths))
    record: FirstTokenRecord = {
        "what": "time to the first token of a document, through the server; GPT-2 without one",
        "machine": machine(device),
        "model": Path(run).name,
        "parameters": sum(x.numel() for x in model.parameters()),
        "question_tokens": len(tokenizer.encode(QUESTION)),
        "first_token": [],
        "gpt2": [],
    }
    documents = Documents(tokens, tokenizer.bos)
    n_stages = STAGES * len(lengths) + len(gpt2_lengths)
    try:
        with progress_bar("first token", n_stages, "stages") as advance:
            for row in served_rows(run, documents, lengths, device, advance):
                record["first_token"].append(row)
            rows = baseline_rows(model.config, gpt2_lengths, time_limit, memory_gb, device)
            for n in gpt2_lengths:
                advance(0, note=f"GPT-2, {n:,} tokens")
                record["gpt2"].append(next(rows))
                advance(1)
    except KeyboardInterrupt:
        raise Interrupted(record) from None
    return record


@dataclass(frozen=True)
class Documents:
    """Documents of any length: the tokens of a text, repeated if it is too short."""

    tokens: Sequence[int]
    bos: int

    def of_length(self, n: int) -> list[int]:
        """Return n tokens, the first of which is bos."""
        n_repeats = -(-n // len(self.tokens))
        return [self.bos, *(list(self.tokens) * n_repeats)[: n - 1]]


def served_rows(
    run: str, documents: Documents, lengths: Sequence[int], device: torch.device, advance: Advance
) -> Iterator[ServedRow]:
    """Yield the times of every length; each has a new server, so that its peak memory counts."""
    for n in lengths:
        found: ServedTiming | Failure
        try:
            with TemporaryDirectory() as store:
                options = [*server_options(n), "--device", str(device)]
                document = documents.of_length(n)
                found = time_served(run, document, Path(store), options, advance)
        except RequestError as error:
            found = Failure(failed=str(error))
        yield {"tokens": n, **found}


def server_options(n_tokens: int) -> list[str]:
    """Return options of `tvq serve` that allow a document of this length, and the question."""
    n_tokens = max(n_tokens, len(QUESTION.encode()))  # as many as with a tokenizer of bytes
    megabytes = 1 + BYTES_PER_TOKEN * n_tokens // 10**6
    limits = f"--max-prompt-tokens {n_tokens} --max-body-mb {megabytes} --stop-time 1"
    return limits.split()


def time_served(
    run: str, document: list[int], store: Path, options: Sequence[str], advance: Advance
) -> ServedTiming:
    """Measure one document: as a prompt, as a stored context, and after a restart.

    Raises RequestError.
    """
    n = len(document)

    def show(stage: str, done: int) -> None:
        advance(done, note=f"{n:,} tokens, {stage}")

    with serving(run, store, options) as server:
        warm_up(server.port, document)
        show("as the prompt", 0)
        whole = {"prompt": document}
        prompt_seconds = median_seconds(lambda: first_token(server.port, whole, n_cached=0))
        show("upload", 1)
        start = time.perf_counter()
        context = upload(server.port, document)
        upload_seconds = time.perf_counter() - start
        show("stored context", 1)
        question = {"prompt": QUESTION, "context": context["id"]}
        context_seconds = median_seconds(lambda: first_token(server.port, question, n_cached=n))
        peak = peak_bytes_of(server.pid)
    show("restart", 1)
    with serving(run, store, options) as server:
        warm_up(server.port, document)
        restarted_seconds = first_token(server.port, question, n_cached=n)
    show("done", 1)
    return {
        "prompt_seconds": prompt_seconds,
        "upload_seconds": upload_seconds,
        "context_seconds": context_seconds,
        "restarted_seconds": restarted_seconds,
        "context_bytes": context["bytes"],
        "peak_bytes": peak,
    }


def warm_up(port: int, document: list[int]) -> None:
    """Send a short prompt: the first request to a server pays for what it sets up."""
    first_token(port, {"prompt": document[:1]}, n_cached=0)


def first_token(port: int, body: dict[str, Any], *, n_cached: int) -> float:
    """Return the seconds from a request for one token to the first event of its stream.

    n_cached: tokens that the server should not have to process, to check what is measured. Raises
    RequestError.
    """
    fixed = {"max_tokens": 1, "temperature": 0, "stream": True}
    content = json.dumps(body | fixed | {"stream_options": {"include_usage": True}}).encode()
    seconds, usage = None, None
    start = time.perf_counter()
    for value in _responses(port, "/v1/completions", content):
        if seconds is None:
            seconds = time.perf_counter() - start
        usage = value.get("usage", usage)
    if seconds is None or usage is None:
        raise RequestError("the response of the server is incomplete")
    found = usage["prompt_tokens_details"]["cached_tokens"]
    if found != n_cached:
        raise RequestError(f"{found:,} tokens were reused instead of {n_cached:,}")
    return seconds


def upload(port: int, document: list[int]) -> dict[str, Any]:
    """Upload a document; return the description of its stored context. Raises RequestError."""
    (found,) = _responses(port, "/v1/contexts", json.dumps({"tokens": document}).encode())
    return found


def _responses(port: int, path: str, content: bytes) -> Iterator[dict[str, Any]]:
    """Send JSON; yield the objects of the response, which is a stream or one object."""
    try:
        with connection_to(port) as connection:
            response = post(connection, path, content)
            if response.status not in (200, 201):
                raise RequestError(f"status {response.status}: {_message(response.read())}")
            is_stream = "event-stream" in response.headers.get("Content-Type", "")
            for value in events(response) if is_stream else [json.loads(response.read())]:
                if "error" in value:
                    raise RequestError(value["error"]["message"])
                yield value
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"the server does not respond ({type(error).__name__})") from error


def _message(content: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content[:200].decode(errors="replace")


def table(record: FirstTokenRecord) -> str:
    """Return a Markdown table with a row per length; times are seconds."""
    served = {row["tokens"]: row for row in record["first_token"]}
    gpt2 = {row["tokens"]: row for row in record["gpt2"]}
    lines = [
        "| tokens | document as the prompt, s | upload, s | stored context, s | after a restart, s "
        "| context MB | server peak MB | GPT-2, s | GPT-2 peak MB |",
        "| ---: " * 9 + "|",
    ]
    for n in sorted(served.keys() | gpt2.keys()):
        cells = [f"{n:,}", *_served_cells(served.get(n)), *_gpt2_cells(gpt2.get(n))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _served_cells(row: ServedRow | None) -> list[str]:
    if row is None or "failed" in row:
        return [row["failed"] if row else "", *[""] * 5]
    times = [
        row[key]
        for key in ("prompt_seconds", "upload_seconds", "context_seconds", "restarted_seconds")
    ]
    return [
        *(f"{seconds:,.3f}" for seconds in times),
        megabytes(row["context_bytes"]),
        megabytes(row["peak_bytes"]),
    ]


def _gpt2_cells(row: BaselineRow | None) -> list[str]:
    if row is None or "failed" in row:
        return [row["failed"] if row else "", ""]
    return [f"{row['seconds']:,.3f}", megabytes(row["peak_bytes"])]


def megabytes(n_bytes: int | None) -> str:
    """Format bytes as megabytes; None is empty."""
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.1f}"
