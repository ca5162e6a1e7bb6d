"""Settings and record types of `tvq bench recall`. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Annotated, Any, Literal, TypedDict, TypeGuard, get_args

from transformer_vq.bench.records import Machine
from transformer_vq.config import ModelConfig
from transformer_vq.config.checks import Range, check_fields, shown
from transformer_vq.errors import UserError

RecallTask = Literal["mqar", "copy", "needle"]
"""Multi-query associative recall, copying, or a key-value pair in text."""
RecallModel = Literal["full", "window", "vq", "mamba"]

N_KEYS, N_VALUES = 48, 48  # tokens that mqar and copy draw from
WINDOW_CODES = 128  # of the model without cache, whose keys are quantized as well
SHORTEST = 16  # tokens of the shortest training sequences
SHORT_BLOCKS = 4  # blocks of the longest training sequences with full attention
MAX_LEN = 2**20

Count = Annotated[int, Range(1, 10**9)]
Length = Annotated[int, Range(1, MAX_LEN)]


class RecallRow(TypedDict):
    """The accuracy of one trained model at one context length."""

    task: RecallTask
    model: RecallModel
    n_code: int | None
    seed: int
    context: int
    accuracy: float
    """Fraction of the scored tokens that are the most likely prediction."""
    state_bytes: int
    """Size of the state of one sequence after this context."""
    parameters: int
    seconds: float
    """Duration of the training."""


class RecallRecord(TypedDict):
    """All finished trainings. More can be added with the same settings."""

    what: str
    machine: Machine
    settings: dict[str, Any]
    recall: list[RecallRow]


@dataclass(frozen=True)
class Candidate:
    """One of the compared models; n_code: None for models without codebooks."""

    model: RecallModel
    n_code: int | None = None

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        names = {"full": "full attention", "window": "window only", "mamba": "Mamba"}
        return names.get(self.model) or f"VQ, {self.n_code:,} codes"

    @property
    def place(self) -> tuple[int, int]:
        """The sort key in tables and figures."""
        return get_args(RecallModel).index(self.model), self.n_code or 0


def candidates(models: Sequence[RecallModel], codes: Sequence[int]) -> list[Candidate]:
    """Return the models to compare, vq once per codebook size, in the order of the tables."""
    sizes: dict[str, Sequence[int | None]] = {"window": [WINDOW_CODES], "vq": codes}
    found = {Candidate(model, n) for model in models for n in sizes.get(model, [None])}
    return sorted(found, key=lambda candidate: candidate.place)


@dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """What determines an accuracy, apart from task, model and seed.

    Field docstrings are the help texts of `tvq bench recall`.
    """

    lengths: tuple[Length, ...] = (128, 256, 512, 1024, 2048)
    """Context lengths to evaluate."""
    train_len: Length = 512
    """Longest training sequences. Training starts with 16 tokens."""
    steps: Count = 1000
    """Training steps per model."""
    full_share: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the steps in which vq and window train with full attention, on sequences of up to
    4 blocks, because quantized keys delay the start of learning."""
    step_tokens: Count = 2048
    """Tokens per training step."""
    lr: Annotated[float, Range(0, 1, above=True)] = 3e-3
    """Peak learning rate of AdamW."""
    eval_sequences: Count = 64
    """Held-out sequences per context length."""
    pairs: Annotated[int, Range(1, N_KEYS)] = 16
    """Key-value pairs of mqar."""
    copied: Annotated[int, Range(1, N_KEYS + N_VALUES)] = 16
    """Tokens of the string of copy."""
    value_len: Length = 4
    """Tokens of the value of needle."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layer: int = 2
    """Transformer layers; Mamba has twice as many."""
    d_k: int = 16
    """Width of queries and keys, per head."""
    block_len: int = 32
    """Tokens per block."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.lengths:
            raise UserError("lengths: give at least one context length")
        if self.train_len < SHORTEST:
            raise UserError(f"train_len={shown(self.train_len)}: must be at least {SHORTEST}")
        _ = self.model(Candidate("full"), vocab_size=2)  # checks the sizes

    def model(self, candidate: Candidate, vocab_size: int) -> ModelConfig:
        """Return the config of a transformer, without cache for `window`."""
        base = ModelConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layer=self.n_layer,
            head_type="mha",
            d_k=self.d_k,
            block_len=self.block_len,
            ema_decay=0.95,  # runs are short
            commit_coef=1e-4,
        )
        if candidate.n_code is None:
            return replace(base, attention="full")
        has_cache = candidate.model == "vq"
        return replace(base, n_code=candidate.n_code, compressive_cache=has_cache)

    def train_lengths(self, quantized: bool) -> list[int]:
        """Return the lengths of the training sequences with or without quantized keys."""
        powers = [SHORTEST << i for i in range(MAX_LEN.bit_length())]
        if quantized:
            shortest = min(2 * max(SHORTEST, self.block_len), self.train_len)
            return [*(n for n in powers if shortest <= n < self.train_len), self.train_len]
        longest = max(SHORTEST, min(SHORT_BLOCKS * self.block_len, self.train_len))
        return [n for n in powers if n <= longest]

    def record(self) -> dict[str, Any]:
        """Return plain values for a JSON record."""
        return {**asdict(self), "lengths": list(self.lengths)}

    def at(self, length: int) -> RecallSettings:
        """Return the settings for a short training sequence, which has less to remember."""
        return replace(
            self,
            pairs=min(self.pairs, max(length // 8, 1)),
            copied=min(self.copied, length // 8),
            value_len=min(self.value_len, length // 4),
        )

    def min_len(self, task: RecallTask) -> int:
        """Return the length of the shortest sequences of a task."""
        lengths: dict[RecallTask, int] = {
            "mqar": 4 * self.pairs,
            "copy": 2 * self.copied + 2,
            "needle": 2 * self.value_len + 4,
        }
        return lengths[task]


def check_lengths(tasks: Sequence[RecallTask], settings: RecallSettings) -> None:
    """Raise UserError if a context length is too short for a task."""
    for task in tasks:
        shortest = settings.min_len(task)
        for length in settings.lengths:
            if length < shortest:
                raise UserError(
                    f"lengths={shown(length)}: {task} needs at least {shortest} tokens; use longer "
                    "contexts or fewer tokens to remember"
                )


def is_recall_record(value: object) -> TypeGuard[RecallRecord]:
    """Return whether a JSON value has the keys of a record."""
    if not isinstance(value, dict) or not RecallRecord.__required_keys__ <= value.keys():
        return False
    rows, keys = value["recall"], RecallRow.__required_keys__
    is_list = isinstance(value["settings"], dict) and isinstance(rows, list)
    return is_list and all(isinstance(row, dict) and keys <= row.keys() for row in rows)


def candidate_of(row: RecallRow) -> Candidate:
    """Return the model of a row."""
    return Candidate(row["model"], row["n_code"])


def by_task(record: RecallRecord) -> dict[RecallTask, dict[Candidate, list[RecallRow]]]:
    """Return the rows of every model, by task."""
    rows = sorted(record["recall"], key=lambda row: candidate_of(row).place)
    found: dict[RecallTask, dict[Candidate, list[RecallRow]]] = {}
    for row in rows:
        found.setdefault(row["task"], {}).setdefault(candidate_of(row), []).append(row)
    return {task: found[task] for task in get_args(RecallTask) if task in found}


def accuracies(rows: Sequence[RecallRow], length: int) -> tuple[float, float | None]:
    """Return mean and standard deviation over seeds at one context length; None for one seed."""
    values = [row["accuracy"] for row in rows if row["context"] == length]
    return mean(values), stdev(values) if len(values) > 1 else None
