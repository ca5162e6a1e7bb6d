"""What the doctor finds: plain values, and the conversion of exceptions into findings."""

from __future__ import annotations

import getpass
import math
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from transformer_vq.errors import is_out_of_memory

Status = Literal["ok", "FAILED", "skipped"]

MAX_NOTE = 160  # characters of an error message
# Errors that mean that torch.compile lacks a tool on this machine, with what it lacks.
MISSING_TOOLS = {
    "InvalidCxxCompiler": "torch.compile needs a C++ compiler",
    "TritonMissing": "torch.compile needs triton",
    "working triton installation": "torch.compile needs triton",
    "GPUTooOldForTriton": "the GPU is too old for triton",
}


@dataclass(frozen=True)
class Check:
    """The comparison of one path with float64, over several cases."""

    path: str
    dtype: str
    status: Status
    error: float | None = None
    """Largest relative RMS error of all cases; None if nothing was computed."""
    tolerance: float | None = None
    n_cases: int = 0
    note: str = ""
    """The worst case, what failed, or why the check was skipped."""


@dataclass(frozen=True)
class Repeat:
    """Whether a path gives bitwise equal results twice."""

    path: str
    status: Literal["equal", "differs", "FAILED", "skipped"]
    note: str = ""
    """The tensors that differ, what failed, or why nothing was repeated."""


@dataclass(frozen=True)
class Syncs:
    """How often the host waited for the GPU."""

    what: str
    count: int | None
    """None if nothing was counted."""
    locations: dict[str, int] = field(default_factory=dict)
    note: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Errors:
    """Relative RMS errors by the name of a case."""

    by_case: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The case with the largest error; an error that is not finite is the largest."""
        return max(
            self.by_case.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf
        )


def check(path: str, dtype: str, tolerance: float, measure: Callable[[], Errors]) -> Check:
    """Run one check. Exceptions, including those of a GPU, become the result; Ctrl-C does not."""
    try:
        errors = measure()
    except Exception as error:
        status, note = explain(error)
        return Check(path, dtype, status, None, tolerance, 0, note)
    name, worst = errors.worst
    n = len(errors.by_case)
    if not math.isfinite(worst):
        return Check(path, dtype, "FAILED", None, tolerance, n, f"not finite: {name}")
    if worst <= tolerance:
        return Check(path, dtype, "ok", worst, tolerance, n, f"worst: {name}")
    n_wrong = sum(not x <= tolerance for x in errors.by_case.values())
    return Check(path, dtype, "FAILED", worst, tolerance, n, f"{n_wrong} of {n}, worst: {name}")


def explain(error: Exception) -> tuple[Status, str]:
    """Return whether an exception means that a path is broken or cannot run here, and why."""
    if is_out_of_memory(error):
        return "FAILED", "out of memory"
    text = f"{type(error).__name__}: {error}"
    for sign, reason in MISSING_TOOLS.items():
        if sign in text:
            return "skipped", reason
    return "FAILED", without_places(text)


def without_places(text: str) -> str:
    """Return the first line of a text, shortened, without folders, host name and user name."""
    line = next((x.strip() for x in text.splitlines() if x.strip()), "")
    line = re.sub(r"(?<![\w.])~?(?:/[^\s/:;,'\"()|]+)*/(?=[^\s/])", ".../", line)
    for name in _names():
        line = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", line)
    line = line.replace("|", "/")  # a column of a Markdown table ends here
    return line if len(line) <= MAX_NOTE else f"{line[:MAX_NOTE]}..."


def _names() -> Iterator[str]:
    """Yield the host and user name, unless they are too short to be recognized."""
    found = [platform.node()]
    with suppress(OSError, KeyError):
        found.append(getpass.getuser())
    yield from (name for name in found if len(name) > 2)
