"""Output that several commands share, and error messages in one line."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformer_vq.errors import NotEnoughMemoryError, is_out_of_memory

if TYPE_CHECKING:
    from transformer_vq.training.checkpoint import TrainingResult


def program_name() -> str:
    """Return how to start this program, for commands that the user may paste."""
    path = sys.argv[0]
    if os.path.basename(path) != "tvq":
        return f"{sys.executable} -m transformer_vq"
    found = shutil.which("tvq")
    is_in_path = found is not None and os.path.exists(path) and os.path.samefile(found, path)
    return "tvq" if is_in_path else shlex.quote(path)


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
        "best_validation_nats_per_token": _finite(result.best_loss),
        "best_validation_bits_per_byte": _finite(result.best_bits_per_byte),
    }
    print_json(record, as_json)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _finite(x: float) -> float | None:
    """Return a number, or None if JSON cannot represent it."""
    return x if math.isfinite(x) else None


@contextmanager
def out_of_memory_advice(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into a NotEnoughMemoryError with advice."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise NotEnoughMemoryError(f"out of memory; {advice}") from error
        raise


def accept_any_text() -> None:
    """Let stdout print text that its encoding does not support, such as odd file names.

    Undecodable bytes are printed unchanged, other unsupported characters as escapes.
    """

    def encode(error: UnicodeError) -> tuple[str | bytes, int]:
        try:
            return codecs.lookup_error("surrogateescape")(error)
        except UnicodeError:
            return codecs.lookup_error("backslashreplace")(error)

    codecs.register_error("tvq", encode)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="tvq")


def discard_output() -> None:
    """Discard buffered output if stdout cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def os_error_message(error: OSError) -> str:
    """Return what failed, and the name of the file if it is known."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"cannot use {error.filename}: {error.strerror}"


def one_line(message: str) -> str:
    """Return a message without line breaks, errno numbers, control characters and long words."""
    line = re.sub(r"\[Errno \d+\] ", "", " ".join(message.split()))
    line = re.sub(r"[^\s:;,'\"]{300,}", lambda word: f"{word[0][:60]}...", line)
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in line)
