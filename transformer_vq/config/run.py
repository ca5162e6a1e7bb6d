"""Run configs: data, optimizer, training and parallelism."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from transformer_vq.config.checks import Range, check_fields, from_plain, shown
from transformer_vq.config.data import DataConfig, Fraction
from transformer_vq.config.model import BelowOne, ModelConfig, Reduction
from transformer_vq.errors import UserError

OptimizerName = Literal["adamw", "adafactor", "muon"]
Schedule = Literal["cosine", "wsd"]
Precision = Literal["fp32", "bf16"]

Rows = Annotated[int, Range(1, 2**24)]
Count = Annotated[int, Range(1, 2**40)]
Processes = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, Range(1e-30, 1e30)]

# Fields that may change when a run is resumed without affecting its result: the data may move, and
# logs, validations and checkpoints do not affect the training. The device, `compile`, `reduction`,
# `checkpoint_activations` and the mesh affect rounding only.
NEUTRAL_FIELDS = frozenset(
    {
        *("data.path", "data.validation_path", "data.test_path", "data.cache"),
        *("train.device", "train.compile", "train.peak_tflops"),
        *("train.reduction", "train.checkpoint_activations"),
        *("train.log_every", "train.eval_every", "train.eval_tokens", "train.save_every"),
        *("train.keep", "train.tensorboard", "train.wandb"),
        *("parallel.dp", "parallel.fsdp", "parallel.cp", "parallel.tp"),
    }
)
# Fields that may change when a run is resumed and change the training from that step on. RUN/
# history.jsonl records them. `accumulate` also changes which dropout masks are drawn.
RECORDED_FIELDS = frozenset(
    {
        *("optim.lr", "optim.lr_final_share", "optim.decay_share"),
        *("optim.weight_decay", "optim.grad_clip"),
        *("train.steps", "train.accumulate", "train.precision"),
    }
)
FREE_FIELDS = NEUTRAL_FIELDS | RECORDED_FIELDS
"""All fields that may change when a run is resumed."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer settings; the defaults are those of the paper's small models."""

    optimizer: OptimizerName = "adamw"
    """AdamW; Adafactor with parameter-scaled steps; or Muon: orthogonalized momentum for hidden
    matrices, AdamW for the rest."""
    lr: Positive = 4e-4
    """Peak learning rate."""
    warmup: Annotated[int, Range(0, 2**40)] = 10_000
    """Steps of linear warm-up from zero to the peak learning rate."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine decay until the last step, or wsd: stable, then decay at the end,
    so that the run can be extended."""
    decay_share: Fraction = 0.2
    """Share of all steps, at the end, in which wsd decays the learning rate."""
    lr_final_share: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    weight_decay: BelowOne = 0.0
    """Weight decay: fraction subtracted from each weight at every step, independent of the learning
    rate."""
    grad_clip: Positive | None = 0.1
    """Maximum global gradient norm; None disables clipping."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Decay rates of AdamW's first and second moments."""
    eps: Positive = 1e-9
    """AdamW's epsilon, added to the denominator."""
    update_clip: Positive = 1.0
    """Maximum root mean square of an Adafactor update."""

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        unused = ("betas", "eps") if self.optimizer == "adafactor" else ("update_clip",)
        for name in unused:
            if getattr(self, name) != getattr(OptimConfig, name):
                raise UserError(
                    f"optim.{name}={shown(getattr(self, name))}: optim.optimizer={self.optimizer} "
                    "does not use it; leave it out"
                )
        if self.schedule != "wsd" and self.decay_share != OptimConfig.decay_share:
            raise UserError(
                f"optim.decay_share={shown(self.decay_share)}: optim.schedule={self.schedule} does "
                "not use it; leave it out, or use --optim.schedule wsd"
            )

    def decay_start(self, n_steps: int) -> int:
        """Return the number of steps before the learning rate starts to decay.

        n_steps: total number of steps; with wsd, at least the last one belongs to the decay.
        """
        if self.schedule == "cosine":
            return self.warmup
        return n_steps - max(round(self.decay_share * n_steps), 1)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop: batches, execution, logging, validation and checkpoints."""

    steps: Count = 125_000
    """Optimizer steps; each uses batch_size * backprop_len tokens."""
    batch_size: Rows = 128
    """Sequences per step."""
    seq_len: Count = 8192
    """Tokens per sequence; the state is carried from the first window to the last."""
    backprop_len: Count = 2048
    """Tokens per window of truncated backpropagation through time."""
    weight_average: BelowOne = 0.0
    """Decay of an exponential moving average of the weights, which is then validated and saved as
    the best model; 0 disables it."""
    accumulate: Annotated[int, Range(0, 2**24)] = 1
    """Gradient accumulation: micro-batches per step; 0 chooses the fewest that fit in memory."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products; weights, codebooks, softmax and loss stay fp32."""
    reduction: Reduction = "auto"
    """How cache statistics are reduced across blocks; results agree up to rounding. triton: GPU
    kernels, which need the extra `triton`."""
    checkpoint_activations: bool = False
    """Activation checkpointing: less memory, more time."""
    compile: bool | None = None
    """Use torch.compile: slow start, then faster steps; by default on GPUs only."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if available."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Random seed for initial weights, data order and dropout."""
    init_from: str | None = None
    """Fine-tune: initialize weights and codebooks from this run, model file or exported folder."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of one device, for model FLOP utilization (MFU); by default the vendor's figure,
    if it is known."""
    log_every: Count = 1
    """Steps between two rows in metrics.jsonl."""
    eval_every: Count = 1000
    """Steps between validations; the best model so far is kept."""
    eval_tokens: Count = 1_000_000
    """Validation tokens, taken from the start of the split."""
    save_every: Count = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: Count = 2
    """Number of newest checkpoints to keep; wsd also keeps the one before its decay."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.seq_len % self.backprop_len:
            raise UserError(
                f"train.seq_len={self.seq_len} is not a multiple of "
                f"train.backprop_len={self.backprop_len}; change one of them"
            )
        if self.accumulate and self.batch_size % self.accumulate:
            raise UserError(
                f"train.batch_size={self.batch_size} is not a multiple of "
                f"train.accumulate={self.accumulate}; change one of them"
            )
        start = self.init_from
        if start is not None and os.path.expanduser(start).startswith("~"):
            raise UserError(
                f"train.init_from={shown(start)}: home folder not found; give a full path"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """Process mesh under `torchrun`: dp x fsdp x cp x tp processes."""

    dp: Annotated[int, Range(0, 2**20)] = 0
    """Data parallel: a full model and its own sequences per rank; 0 uses all remaining ranks."""
    fsdp: Processes = 1
    """Sharded data parallel: weights and optimizer state are sharded across ranks."""
    cp: Processes = 1
    """Context parallel: each sequence is sharded across ranks."""
    tp: Processes = 1
    """Tensor parallel: the widths of every layer are sharded across ranks."""

    def __post_init__(self) -> None:
        check_fields(self, "parallel")

    @property
    def n_rows(self) -> int:
        """Number of ranks that a batch is split across."""
        return max(self.dp, 1) * self.fsdp

    @property
    def n_processes(self) -> int:
        return self.n_rows * self.cp * self.tp

    def fill(self, n_processes: int) -> ParallelConfig:
        """Return this mesh with `dp` filled in; raise UserError if it does not fit n_processes."""
        others = self.fsdp * self.cp * self.tp
        filled = self if self.dp else replace(self, dp=max(n_processes // others, 1))
        if filled.n_processes == n_processes:
            return filled
        asked = f"{filled.dp} x {self.fsdp} x {self.cp} x {self.tp} = {filled.n_processes}"
        raise UserError(
            f"parallel: dp x fsdp x cp x tp = {asked} processes requested, but {n_processes} are "
            f"running; start with `torchrun --nproc-per-node {filled.n_processes} -m "
            "transformer_vq ...`, or change --parallel.*"
        )


@dataclass(frozen=True)
class RunConfig:
    """A training run; presets are run configs."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __post_init__(self) -> None:
        check_fields(self)
        start = self.optim.decay_start(self.train.steps)
        if self.optim.warmup > start:
            raise UserError(
                f"optim.warmup={self.optim.warmup}: the decay of optim.schedule=wsd starts at step "
                f"{start} of {self.train.steps}; use a shorter --optim.warmup, a smaller "
                "--optim.decay-share or more --train.steps"
            )

    @classmethod
    def from_dict(cls, values: object) -> RunConfig:
        """Build a run config from its JSON form; raise UserError for anything else."""
        return from_plain(cls, values)

    @classmethod
    def from_stored(cls, values: dict[str, Any]) -> RunConfig:
        """Build the config of an existing run from its JSON form.

        Earlier versions had one optional path and no end of documents.
        """
        data = values.get("data")
        if isinstance(data, dict):
            data = {"end_of_document": False} | data
            if data.get("path") is None:
                data.pop("path", None)
            values = values | {"data": data}
        return cls.from_dict(values)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, as `section.field`, with both values."""
        found = {}
        for part in fields(self):
            ours, theirs = getattr(self, part.name), getattr(other, part.name)
            for name, value in asdict(ours).items():
                if value != getattr(theirs, name):
                    found[f"{part.name}.{name}"] = (value, getattr(theirs, name))
        return found
