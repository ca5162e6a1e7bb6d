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
from typing import Any, Literal

import torch
import tyro

import gpt2
from common import (
    Device,
    Interrupted,
    Output,
    Record,
    check_positive,
    label_end,
    log_lengths,
    log_values,
    main,
    median_seconds,
    new_figure,
)
from measure import (
    Failure,
    free_memory,
    in_subprocess,
    machine,
    process_bytes,
)
from serving import connection_to, events, post, serving
from transformer_vq.config import ModelConfig
from transformer_vq.device import find_device
from transformer_vq.errors import MissingExtraError, UserError
from transformer_vq.plots import BLUE, GREEN, ORANGE, SKY, note
from transformer_vq.progress import Advance, progress_bar
from transformer_vq.serve.engine import check_servable
from transformer_vq.training.loading import load_model_and_tokenizer

QUESTION = "\n\nWhat happened at the beginning of the story?\n\n"


BYTES_PER_TOKEN = 12  # of JSON: digits, a comma and a space


STAGES = 4  # of a length: prompt, upload, stored context, restart


class RequestError(RuntimeError):
    """A request that did not get the expected response."""


def measure(options: Options) -> Record:
    """Measure documents of all lengths through a server, then GPT-2.

    Raises Interrupted on Ctrl-C.
    """
    lengths = options.tokens
    gpt2_lengths = lengths if options.gpt2_tokens is None else options.gpt2_tokens
    device = find_device(options.device)
    memory_gb = options.memory_gb or free_memory(device) / 1e9
    check_positive(tokens=lengths, gpt2_tokens=gpt2_lengths)
    check_positive(time_limit=options.time_limit, memory_gb=options.memory_gb)
    run, (model, tokenizer) = options.model, load_model_and_tokenizer(options.model)
    check_servable(model)
    tokens = tokenizer.encode(options.text.read_text("utf-8", errors="replace"))
    if not tokens:
        raise UserError("the text for documents is empty; give a longer one")
    lengths, gpt2_lengths = sorted(set(lengths)), sorted(set(gpt2_lengths))
    record: Record = {
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
            rows = baseline_rows(model.config, gpt2_lengths, options.time_limit, memory_gb, device)
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
) -> Iterator[Record]:
    """Yield the times of every length; each has a new server, so that its peak memory counts."""
    for n in lengths:
        found: Record | Failure
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
) -> Record:
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
        peak = process_bytes("VmHWM", server.pid)
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


def table(record: Record) -> str:
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


def _served_cells(row: Record | None) -> list[str]:
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


def _gpt2_cells(row: Record | None) -> list[str]:
    if row is None or "failed" in row:
        return [row["failed"] if row else "", ""]
    return [f"{row['seconds']:,.3f}", megabytes(row["peak_bytes"])]


def megabytes(n_bytes: int | None) -> str:
    """Format bytes as megabytes; None is empty."""
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.1f}"


START = 120.0  # seconds of a subprocess for imports, warm-up and repeated short prefills


def baseline_rows(
    config: ModelConfig,
    lengths: Sequence[int],
    time_limit: float,
    memory_gb: float,
    device: torch.device,
) -> Iterator[Record]:
    """Yield the prefill of every length, the shortest first, each in a subprocess.

    A length that would take longer than `time_limit` seconds, or more memory, is not run. Without
    transformers, all rows say so.
    """
    try:
        gpt2.check_installed()
    except MissingExtraError as error:
        for n in sorted(lengths):
            yield {"tokens": n, "failed": f"not run: {error}"}
        return
    measured: dict[int, float] = {}
    failed: Failure | None = None
    for n in sorted(lengths):
        row: Record = {"tokens": n}
        found: Record | Record | Failure
        if predicted := not_run(config, n, measured, time_limit, memory_gb):
            found = predicted
        elif failed is not None:
            found = failed
        else:
            found = in_subprocess(
                gpt2.time_prefill,
                config,
                n,
                device,
                memory_gb=memory_gb if device.type == "cpu" else None,
                seconds=START + time_limit,
            )
            if "failed" in found:  # longer ones would fail too
                failed = Failure(failed=f"not run: {n:,} tokens failed")
            else:
                measured[n] = found["seconds"]
        yield {**row, **found}


def not_run(
    config: ModelConfig,
    n_tokens: int,
    measured: dict[int, float],
    time_limit: float,
    memory_gb: float,
) -> Record | None:
    """Return why a length should not be run, or None.

    measured: seconds by length, for shorter ones.
    """
    seconds = predict_seconds(config, measured, n_tokens)
    needed = gpt2.kv_bytes(config, n_tokens)
    reasons = []
    if seconds is not None and seconds > time_limit:
        reasons.append(f"would take about {about(seconds)}")
    if needed > 1e9 * memory_gb:
        reasons.append(f"needs {needed / 1e9:,.3g} GB for keys and values")
    if not reasons:
        return None
    why = f"not run: {' and '.join(reasons)} (prediction)"
    return {"failed": why, "estimated_seconds": seconds, "estimated_bytes": needed}


def predict_seconds(config: ModelConfig, measured: dict[int, float], n_tokens: int) -> float | None:
    """Return the predicted time of a prefill from those of shorter prompts; None if there are none.

    The time is a * n + b * n^2, through the two longest measured prompts. If there is only one, or
    the times of short prompts are too noisy to separate the two parts, the ratio of the FLOPs is
    used instead.
    """
    if not measured:
        return None
    *rest, longest = sorted(measured)
    if rest:
        shorter = rest[-1]
        per_token = {n: measured[n] / n for n in (shorter, longest)}
        b = (per_token[longest] - per_token[shorter]) / (longest - shorter)
        a = per_token[longest] - b * longest
        if a >= 0 and b > 0:
            return a * n_tokens + b * n_tokens**2
    return measured[longest] * prefill_flops(config, n_tokens) / prefill_flops(config, longest)


def prefill_flops(config: ModelConfig, n_tokens: int) -> int:
    """Return the FLOPs of a prefill: matrices, and causal attention."""
    width, n_layer = gpt2.shape(config)
    return n_layer * (24 * width**2 * n_tokens + 2 * width * n_tokens**2)


def about(seconds: float) -> str:
    """Format a long time: 90 s, 12 minutes, 3.4 hours."""
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.3g} hours" if seconds < 3.6e6 else f"{seconds / 86400:,.0f} days"


ServedKey = Literal["prompt_seconds", "context_seconds", "restarted_seconds"]


SERVED: dict[ServedKey, tuple[str, str]] = {
    "prompt_seconds": ("Transformer-VQ,\nfirst time", BLUE),
    "context_seconds": ("stored context", SKY),
    "restarted_seconds": ("stored context,\nafter a restart", ORANGE),
}
"""Name and color of the lines of the server."""


def plot_first_token(record: Record, path: Path) -> None:
    """Plot seconds to the first token by length; predictions are open circles."""
    served = [row for row in record["first_token"] if "failed" not in row]
    if not served and not any("seconds" in row for row in record["gpt2"]):
        raise UserError("no document was measured; repeat the benchmark")
    lengths = {row["tokens"] for row in (*record["first_token"], *record["gpt2"])}
    with new_figure(path, height=4.0) as (figure, (axes,)):
        for key, (name, color) in SERVED.items():
            line = [row["tokens"] for row in served], [row[key] for row in served]
            axes.plot(*line, color=color, marker="o")
            if served:
                label_end(axes, line, name, color)
        has_predictions = _draw_gpt2(axes, record["gpt2"])
        axes.set_title("Seconds to the first token")
        axes.margins(y=0.1)
        log_lengths(axes, sorted(lengths), "length of the document (tokens)")
        log_values(axes)
        predicted = "Open circles: predicted from shorter documents, not run. "
        gpt2 = "GPT-2: about as many parameters, KV cache, no server."
        note(figure, predicted * has_predictions + gpt2 * bool(record["gpt2"]))


def _draw_gpt2(axes: Any, rows: list[Record]) -> bool:
    """Draw the measured and the predicted times; return whether there are predictions."""
    measured = [(row["tokens"], row["seconds"]) for row in rows if "seconds" in row]
    predicted = [
        (row["tokens"], seconds)
        for row in rows
        if (seconds := row.get("estimated_seconds")) is not None
    ]
    line = [n for n, _ in measured], [seconds for _, seconds in measured]
    axes.plot(*line, color=GREEN, marker="s")
    if predicted:
        joined = [*measured[-1:], *predicted]
        dotted = [n for n, _ in joined], [seconds for _, seconds in joined]
        axes.plot(*dotted, color=GREEN, linestyle=(0, (1, 2)), lw=1.6)
        ends = [n for n, _ in predicted], [seconds for _, seconds in predicted]
        axes.plot(*ends, "o", color=GREEN, mfc="white", mew=1.6)
        line = ends
    if line[0]:
        label_end(axes, line, "GPT-2", GREEN)
    return bool(predicted)


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure the time to the first token of long documents through `tvq serve`.

    Each document is sent as a prompt, then uploaded as a stored context, from which a short
    question continues, even after the server is started again. GPT-2 of Hugging Face transformers
    with about as many parameters processes as many tokens, with a KV cache and without a server.
    """

    model: tyro.conf.Positional[str]
    """Run folder, or books, the model in the package."""
    text: Path
    """UTF-8 text file that documents are made of; it is repeated if it is too short."""
    tokens: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000)
    """Lengths of the documents."""
    gpt2_tokens: tuple[int, ...] | None = None
    """Lengths for GPT-2, which needs the extra `hf`. None uses those of --tokens; no value skips
    GPT-2."""
    time_limit: float = 3600.0
    """Seconds per length for GPT-2; if shorter ones predict more, the length is not run, and the
    prediction is reported."""
    memory_gb: float | None = None
    """Memory limit of GPT-2; by default the memory that is free."""
    device: Device = "auto"


if __name__ == "__main__":
    main(Options, measure, table, plot_first_token)
