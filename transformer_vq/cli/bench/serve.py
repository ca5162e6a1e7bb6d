"""tvq bench serve: a server under load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.bench.serve_records import ServeSettings
from transformer_vq.cli.arguments import (
    RUN_HINT,
    UsageError,
    check_can_read,
    check_range,
    first_word,
)
from transformer_vq.cli.bench.common import parse_with_output, print_result
from transformer_vq.cli.options import Json, Overwrite

FlatSettings = Annotated[ServeSettings, tyro.conf.arg(name="")]
DEFAULTS = ServeSettings()


@dataclass(frozen=True)
class Serve:
    """Put load on `tvq serve`: errors, mixed-up texts, memory, and tokens/s.

    Many clients stream completions of prompts from a text; some disconnect, some send malformed
    requests. Every text is compared with that of the same request alone, and the throughput with
    that of the engine without HTTP. Prefixes are not reused.
    """

    text: Path
    """UTF-8 text file that prompts are taken from."""
    settings: FlatSettings = DEFAULTS
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """JSON file for the measurements."""
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Start a server, put load on it, print a table."""
    name, rest = first_word(arguments, "bench serve", "RUN", RUN_HINT, Serve)
    options = parse_with_output(Serve, rest, f"serve {name}")
    settings = options.settings
    for field in ("clients", "slots", "requests", "max_prompt", "max_tokens"):
        check_range(f"--{field.replace('_', '-')}", getattr(settings, field), 1, 10**7)
    if not 0 < settings.minutes < 10**5:
        raise UsageError("--minutes: must be above 0")
    shares = (settings.cancelled, settings.malformed, settings.hostile)
    if min(shares) < 0 or sum(shares) > 1:
        raise UsageError(
            "--cancelled, --malformed and --hostile must be shares of at most 1 in all"
        )
    check_can_read("--text", options.text)

    from transformer_vq.bench.serve import measure, table
    from transformer_vq.device import keep_freed_memory
    from transformer_vq.training.loading import load_model_and_tokenizer

    keep_freed_memory()
    model, tokenizer = load_model_and_tokenizer(name)
    text = options.text.read_text("utf-8", errors="replace")
    record = measure(name, model, tokenizer, text, settings)
    print_result(record, table(record), options.out, options.json)
