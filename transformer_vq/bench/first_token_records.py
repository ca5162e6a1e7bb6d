"""Types of the JSON record of `tvq bench first-token`; this module does not import torch."""

from __future__ import annotations

from typing import NotRequired, TypedDict, final

from transformer_vq.bench.records import Machine


@final
class ServedTiming(TypedDict):
    """Seconds from a request to its first token, and what the server needs."""

    prompt_seconds: float
    """The whole document is the prompt."""
    upload_seconds: float
    """The document is uploaded and stored as a context."""
    context_seconds: float
    """A short question continues the stored context."""
    restarted_seconds: float
    """The same after the server was stopped and started again: the context is read from disk."""
    context_bytes: int
    peak_bytes: int | None
    """Peak resident memory of the server before the restart."""


class ServedRow(TypedDict):
    """A document of one length; rows with `failed` have no timings."""

    tokens: int
    failed: NotRequired[str]
    prompt_seconds: NotRequired[float]
    upload_seconds: NotRequired[float]
    context_seconds: NotRequired[float]
    restarted_seconds: NotRequired[float]
    context_bytes: NotRequired[int]
    peak_bytes: NotRequired[int | None]


@final
class BaselineTiming(TypedDict):
    """Seconds from a prompt to the first token, and the peak memory of the process."""

    seconds: float
    peak_bytes: int


@final
class NotRun(TypedDict):
    """A measurement that was not run because it would exceed a limit; the numbers are predicted."""

    failed: str
    estimated_seconds: float | None
    estimated_bytes: int


class BaselineRow(TypedDict):
    """The GPT-2 baseline at one length; rows with `failed` have no timings."""

    tokens: int
    failed: NotRequired[str]
    estimated_seconds: NotRequired[float | None]
    estimated_bytes: NotRequired[int]
    seconds: NotRequired[float]
    peak_bytes: NotRequired[int]


class FirstTokenRecord(TypedDict):
    """Time to the first token by length of the document."""

    what: str
    machine: Machine
    model: str
    parameters: int
    question_tokens: int
    first_token: list[ServedRow]
    gpt2: list[BaselineRow]
