"""Types of the JSON records that benchmarks write and that tables and figures read.

This module does not import torch. The files in benchmarks/ use the same keys, so keys are never
renamed. Keys that older files lack are `NotRequired`.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, final

from transformer_vq.config import HeadType, Precision, Reduction, RunConfig

StepAttention = Literal["vq", "full", "sdpa"]
StepKind = Literal[
    "full", "sdpa", "serial", "matmul", "associative", "input_scan", "auto", "triton"
]
"""Full attention, the SDPA baseline, or the reduction of VQ attention."""
DecodeKind = Literal["vq", "full", "gpt2"]


@final
class Failure(TypedDict):
    """A measurement that ran out of memory or time, or whose subprocess died."""

    failed: str


class Machine(TypedDict):
    """The hardware, the versions and the commit of a measurement."""

    processor: str
    cores: int | None
    threads: int
    memory_gb: float
    python: str
    torch: str
    transformer_vq: str | None
    commit: str | None


class ConfigRecord(TypedDict):
    """The config of a run, without the paths of its data."""

    model: dict[str, Any]
    data: dict[str, Any]
    optim: dict[str, Any]
    train: dict[str, Any]
    parallel: dict[str, Any]


def config_record(config: RunConfig) -> ConfigRecord:
    """Return the config of a run for a record that may be published."""
    values = config.to_dict()
    return {
        "model": values["model"],
        "data": {"dataset": config.data.dataset},  # local paths stay private
        "optim": values["optim"],
        "train": values["train"],
        "parallel": values["parallel"],
    }


# tvq bench train, tvq bench documents


@final
class StepTiming(TypedDict):
    """Seconds of the first step, seconds of each later step, and peak memory."""

    first: float
    seconds: float
    peak_gb: float


class StepRow(TypedDict):
    """The training step of one model at one sequence length.

    Rows with `failed` have no timings.
    """

    head_type: HeadType
    attention: StepAttention
    reduction: Reduction
    seq_len: int
    d_model: int
    n_layer: int
    d_k: int
    n_kv_head: NotRequired[int | None]
    n_code: int
    block_len: int
    vocab_size: int
    batch_size: int
    precision: Precision
    checkpoint_activations: bool
    compile: bool
    device: str
    steps: int
    document_len: int | None
    failed: NotRequired[str]
    estimated_seconds: NotRequired[float]
    timings: NotRequired[list[float]]
    peak_gb: NotRequired[float]
    first_step_seconds: NotRequired[float]
    seconds: NotRequired[float]
    median_seconds: NotRequired[float]
    tokens_per_second: NotRequired[float]
    us_per_token: NotRequired[float]
    flops_per_token: NotRequired[int]
    share_of_rate: NotRequired[dict[str, float]]
    over_full: NotRequired[float | None]
    over_sdpa: NotRequired[float | None]


class StepRecord(TypedDict):
    """Training steps of a grid, and the matrix-product rates of the same machine."""

    what: str
    machine: Machine
    matmul_flops: dict[str, float]
    rows: list[StepRow]


def step_kind(attention: StepAttention, reduction: Reduction) -> StepKind:
    """Return the kind of attention of a training step."""
    return reduction if attention == "vq" else attention


def row_kind(row: StepRow) -> StepKind:
    """Return the kind of attention of a row."""
    return step_kind(row["attention"], row["reduction"])


# tvq bench decode


@final
class DecodeTiming(TypedDict):
    """The time of one decoding step, and the size of the state."""

    ms_per_step: float
    tokens_per_second: float
    state_bytes: int
    share_of_bandwidth: float
    """Bytes of weights and state, over what the memory could deliver in the time of the step."""
    read_bandwidth: float
    """Bytes per second that a large matrix-vector product reads, the best of the record."""


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


# tvq bench ablate


class AblationRow(TypedDict):
    """One setting: the best validation loss of each seed, and the time of a step."""

    n_code: int
    compressive_cache: bool
    bits_per_byte: list[float]
    mean_bits_per_byte: float
    spread: float | None
    seconds_per_update: float
    latency: float


class AblationRecord(TypedDict):
    """All settings of an ablation; `config` is the base."""

    what: str
    machine: Machine
    config: ConfigRecord
    seeds: int
    ablation: list[AblationRow]


# tvq bench profile


class OperatorRow(TypedDict):
    """Seconds per step and total calls of one operator in one part of the step."""

    name: str
    part: str
    seconds: float
    calls: int


@final
class ProfileRecord(TypedDict):
    """Seconds of a training step by part and by operator."""

    what: str
    machine: Machine
    config: ConfigRecord
    steps: int
    seconds_per_step: float
    profiled_seconds_per_step: float
    profile: dict[str, float]
    operators: list[OperatorRow]


# tvq bench context


class ContextRow(TypedDict):
    """One training step on `processes` ranks; a failed step has no loss."""

    processes: int
    seq_len: int
    loss: float | None
    bytes_per_layer: int | None
    failed: NotRequired[str]


class ContextRecord(TypedDict):
    """Training steps under a memory limit per process."""

    megabytes: int
    model: dict[str, Any]
    rows: list[ContextRow]


# tvq bench compare


class RunRecord(TypedDict):
    """The thinned curve and the evaluation of one run."""

    config: ConfigRecord
    parameters: int
    minutes: float
    curve: list[dict[str, Any]]
    evaluation: dict[str, Any]


class RunsRecord(TypedDict):
    """Several runs, by name."""

    runs: dict[str, RunRecord]


# tvq bench tokenize


class TokenizeRow(TypedDict):
    """The preparation of a text of one size."""

    megabytes: float
    mb_per_second: float
    library_mb_per_second: float
    ratio: float
    peak_mb: float
    learning_seconds: float


class TokenizeRecord(TypedDict):
    """Throughput of preparing text next to that of the tokenizer library alone, and memory."""

    tokenizer: str
    vocab_size: int
    tokens_per_byte: float
    rows: list[TokenizeRow]
    machine: Machine


# tvq bench demo


class DemoRecord(TypedDict):
    """Bits per byte of the test split for three models, and a generated text."""

    order_0: float
    order_2: float
    tiny: float
    sample: str
