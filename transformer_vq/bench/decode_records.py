"""The record of `tvq bench decode`; see `records`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, final

from transformer_vq.bench.records import Machine
from transformer_vq.config import Precision

DecodeKind = Literal["vq", "full", "gpt2"]


@final
class DecodeTiming(TypedDict):
    """The time of one decoding step, and the size of the state."""

    ms_per_step: float
    tokens_per_second: float
    state_bytes: int
    share_of_bandwidth: float
    """Bytes of weights and state, over what the memory could deliver in the time of the step; the
    median of several rounds of both."""
    read_bandwidth: float
    """Bytes per second that a large matrix-vector product reads, the median of the rounds."""


class DecodeRow(TypedDict):
    """Decoding with one model after a context of one length."""

    kind: DecodeKind
    context: int
    batch: int
    compiled: bool
    failed: NotRequired[str]
    ms_per_step: NotRequired[float]
    tokens_per_second: NotRequired[float]
    state_bytes: NotRequired[int]
    share_of_bandwidth: NotRequired[float]
    read_bandwidth: NotRequired[float]
    state_precision: NotRequired[Precision]
    """That of the values in the state; fp32 if it is not recorded."""


def decode_name(row: DecodeRow) -> str:
    """Return the name of the model of a row in tables and figures."""
    state = ", bf16 state" if row.get("state_precision") == "bf16" else ""
    return f"{row['kind']}{state}, compiled" if row["compiled"] else f"{row['kind']}{state}"


@final
class PrefillMemory(TypedDict):
    """Peak memory before and after a prefill."""

    before_bytes: int
    peak_bytes: int


class PrefillRow(TypedDict):
    """Peak memory of the prefill of one prompt length."""

    context: int
    failed: NotRequired[str]
    before_bytes: NotRequired[int]
    peak_bytes: NotRequired[int]


class DecodeRecord(TypedDict):
    """Decoding by context length; `reading` has the rows of the prefill."""

    what: str
    machine: Machine
    model: dict[str, Any]
    decode: list[DecodeRow]
    reading: list[PrefillRow]
