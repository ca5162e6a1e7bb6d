"""tvq bench first-token: time to the first token of a very long document, through the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import (
    RUN_HINT,
    UsageError,
    check_can_read,
    check_range,
    first_word,
)
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Device, Json, Overwrite

MAX_LENGTH = 10**8  # tokens; larger numbers are mistakes


@dataclass(frozen=True)
class FirstToken:
    """Measure the time to the first token of long documents through `tvq serve`.

    Each document is sent as a prompt, then uploaded as a stored context, from which a short
    question continues, even after the server is started again. GPT-2 of Hugging Face transformers
    with about as many parameters processes as many tokens, with a KV cache and without a server.
    """

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
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Start servers, measure all lengths, print a table."""
    name, rest = first_word(arguments, "bench first-token", "RUN", RUN_HINT, FirstToken)
    options = parse_with_output(FirstToken, rest, f"first-token {name}")
    if not options.tokens:
        raise UsageError("--tokens: give at least one length")
    gpt2_tokens = options.tokens if options.gpt2_tokens is None else options.gpt2_tokens
    for n in options.tokens:
        check_range("--tokens", n, 1, MAX_LENGTH)
    for n in gpt2_tokens:
        check_range("--gpt2-tokens", n, 1, MAX_LENGTH)
    check_can_read("--text", options.text)

    from transformer_vq.bench.cells import Interrupted
    from transformer_vq.bench.first_token import measure, table
    from transformer_vq.device import find_device
    from transformer_vq.training.loading import load_model_and_tokenizer

    device = find_device(options.device)
    model, tokenizer = load_model_and_tokenizer(name)
    try:
        record = measure(
            name,
            model,
            tokenizer,
            options.text.read_text("utf-8", errors="replace"),
            options.tokens,
            gpt2_tokens,
            time_limit=options.time_limit,
            memory_gb=options.memory_gb,
            device=device,
        )
    except Interrupted as stop:
        if stop.record["first_token"]:
            print_result(stop.record, table(stop.record), options.out, options.json)
        raise
    print_result(record, table(record), options.out, options.json)
