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


KIND_NAMES: dict[StepKind, str] = {
    "full": "full attention",
    "auto": "Transformer-VQ",
    "serial": "Transformer-VQ, serial",
    "matmul": "Transformer-VQ, matmul",
    "associative": "Transformer-VQ, associative",
    "input_scan": "Transformer-VQ, input scan",
    "triton": "Transformer-VQ, Triton kernels",
    "sdpa": "PyTorch SDPA",
}
"""Names in tables and figures, in the order of a legend."""


def row_kind(row: StepRow) -> StepKind:
    """Return the kind of attention of a row."""
    return step_kind(row["attention"], row["reduction"])


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
