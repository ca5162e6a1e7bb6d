"""Output that several commands share, and error messages in one line."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from transformer_vq.config import RunConfig
from transformer_vq.errors import NotEnoughMemoryError, is_out_of_memory

if TYPE_CHECKING:
    from transformer_vq.training.checkpoint import TrainingResult

HELP = frozenset({"-h", "--help", "--help-all"})


def print_json(record: dict[str, Any], wanted: bool) -> None:
    """Print a JSON object on one line if --json was given."""
    if wanted:
        print(json.dumps(record))


def print_training_result(result: TrainingResult, as_json: bool) -> int:
    """Print how training ended; return the exit status, 128 + n if signal n stopped it."""
    if result.stopped_by is None:
        best = ""
        if math.isfinite(result.best_bits_per_byte):
            best = f", best validation {result.best_bits_per_byte:.4f} bits/byte"
        print(f"{result.run}: {result.step} steps{best}")
        print(f"next: tvq eval {result.run} --split test; tvq plot {result.run}")
    else:
        print(f"stopped at step {result.step} and saved; continue with: tvq resume {result.run}")
    record = {
        "run": str(result.run),
        "step": result.step,
        "finished": result.finished,
        "best_validation_nats_per_token": result.best_loss,
        "best_validation_bits_per_byte": result.best_bits_per_byte,
    }
    print_json({k: None if x == math.inf else x for k, x in record.items()}, as_json)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


@contextmanager
def computing(advice: str) -> Iterator[None]:
    """Set up memory and threads; add advice to an error that there is not enough memory."""
    from transformer_vq.device import keep_freed_memory
    from transformer_vq.threads import share_cores

    keep_freed_memory()
    share_cores()
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # frees tensors in its frames
        raise NotEnoughMemoryError(f"out of memory; {advice}") from None


def discard_output() -> None:
    """Discard buffered output if stdout cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def one_line(message: str) -> str:
    """Return a message without line breaks, errno numbers, control characters and long words."""
    line = re.sub(r"\[Errno \d+\] ", "", " ".join(message.split()))
    line = re.sub(r"[^\s:;,'\"]{300,}", lambda word: f"{word[0][:60]}...", line)
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in line)


def as_options(message: str) -> str:
    """Replace field names with options: model.n_code=0 -> --model.n-code 0, top_p=2 -> --top-p 2.

    Fields without a section are recognized only at the start of the message.
    """
    names = "|".join(map(re.escape, sorted(config_fields())))
    pattern = rf"(?<![\w.-])({names})(?:(=)|(?![\w.=]))"
    message = re.sub(pattern, lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)
    return re.sub(r"^([a-z]+(?:_[a-z]+)*)=", lambda m: f"--{m[1].replace('_', '-')} ", message)


@functools.cache
def config_fields() -> frozenset[str]:
    """Return all fields of a run config, such as model.n_code."""
    sections = get_type_hints(RunConfig).items()
    return frozenset(f"{name}.{field.name}" for name, kind in sections for field in fields(kind))
