"""What a model and a run are made of: frozen dataclasses, checked when they are built."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from transformer_vq.checks import Range, check_fields, from_plain, shown
from transformer_vq.errors import UserError

HeadType = Literal["shga", "mqa", "mha", "gqa"]
AttentionType = Literal["vq", "full"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan"]
CodebookInit = Literal["random", "keys"]
OptimizerName = Literal["adamw", "adafactor"]
Dataset = Literal["text", "enwik8", "pg19", "imagenet64", "pictures"]
Precision = Literal["fp32", "bf16"]

# High limits make absurd values fail at once; all positive floats are normal numbers in float32.
Width = Annotated[int, Range(1, 2**24)]
Depth = Annotated[int, Range(1, 2**12)]
Rows = Annotated[int, Range(1, 2**24)]
Count = Annotated[int, Range(1, 2**40)]
Processes = Annotated[int, Range(1, 2**20)]
Real = Annotated[float, Range(-1e30, 1e30)]
Positive = Annotated[float, Range(1e-30, 1e30)]
NotNegative = Annotated[float, Range(0, 1e30)]
Fraction = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, below=True)]
Wavelength = Annotated[float, Range(1, 1e30, above=True)]


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer: its heads, widths and codebook. Nothing else knows head geometry.

    `head_type` fills in what is left open: one wide gated head (shga), one key/value head for all
    query heads (mqa), one per query head (mha), or `n_kv_head` of them (gqa).
    """

    d_model: Width
    """Width of the residual stream."""
    head_type: HeadType = "shga"
    """Single-head gated attention, multi-query, multi-head or grouped-query attention."""
    attention: AttentionType = "vq"
    """Vector-quantized keys in linear time, or full attention in quadratic time."""
    n_head: Width | None = None
    """Query heads; d_model / d_k by default, 1 for shga."""
    n_kv_head: Width | None = None
    """Key/value heads; each serves the same number of query heads."""
    d_k: Width = 128
    """Width of queries and keys, per head."""
    d_v: Annotated[int, Range(1, 2**25)] | None = None
    """Width of values, per key/value head; d_k by default, 2 d_model for shga."""
    norm_input: bool = True
    """Apply RMSNorm to the input of the layer."""
    n_code: Width = 512
    """Codewords per codebook."""
    block_len: Width = 512
    """Tokens per block, and how far the relative positional bias reaches."""
    compressive_cache: bool = True
    """Attend to everything older than the window; False leaves the last block_len tokens only."""
    grad_through_cache: bool = True
    """Let gradients reach values that have been evicted into the cache."""
    p_dropsin: BelowOne = 0.0
    """Dropout on the sinusoids of the relative positions; one mask per sequence."""
    pe_wavelength: Wavelength = 1e5
    """Longest wavelength of the sinusoids."""
    ema_decay: BelowOne = 0.99
    """Decay of the codebooks' running sums and counts."""
    codebook_init: CodebookInit = "keys"
    """Start codebooks from the keys of the first step, or at random as the paper does."""
    revive_below: NotNegative = 0.1
    """Replace codes whose running count falls below this by recent keys; 0 never does."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if self.d_model % 2:
            raise UserError(f"model.d_model={self.d_model}: must be even")
        is_gated = self.head_type == "shga"
        if self.n_head is None and not is_gated and self.d_model % self.d_k:
            raise UserError(
                f"model.d_model={self.d_model} is not a multiple of model.d_k={self.d_k}, as "
                f"model.head_type={self.head_type} needs; change one of them or use shga"
            )
        n_head = self.n_head or (1 if is_gated else self.d_model // self.d_k)
        n_kv_head = self.n_kv_head or {"gqa": 0, "mha": n_head}.get(self.head_type, 1)
        if n_kv_head == 0:
            raise UserError("model.head_type=gqa needs model.n_kv_head, the number of key heads")
        possible = {"shga": n_kv_head == n_head == 1, "mqa": n_kv_head == 1}
        possible |= {"mha": n_kv_head == n_head, "gqa": n_head % n_kv_head == 0}
        if not possible[self.head_type]:
            raise UserError(
                f"model.n_kv_head={n_kv_head} does not go with the {n_head} query heads of "
                f"model.head_type={self.head_type}; leave it out, or use gqa and a divisor of "
                f"{n_head}"
            )
        object.__setattr__(self, "n_head", n_head)
        object.__setattr__(self, "n_kv_head", n_kv_head)
        object.__setattr__(self, "d_v", self.d_v or (2 * self.d_model if is_gated else self.d_k))

    @property
    def heads(self) -> Heads:
        """The geometry, with nothing left open."""
        assert self.n_head is not None
        assert self.n_kv_head is not None
        assert self.d_v is not None
        return Heads(self.n_head, self.n_kv_head, self.d_k, self.d_v, self.head_type == "shga")


@dataclass(frozen=True)
class Heads:
    """Head geometry: `n_kv_head` key/value heads, each serving `n_group` query heads."""

    n_head: int
    n_kv_head: int
    d_k: int
    d_v: int
    is_gated: bool

    @property
    def n_group(self) -> int:
        return self.n_head // self.n_kv_head

    @property
    def divided(self) -> Literal["heads", "query heads", "value columns"]:
        """What tensor parallelism divides: the first of the three that can be divided."""
        if self.n_kv_head > 1:
            return "heads"
        return "query heads" if self.n_head > 1 else "value columns"

    def divide(self, n: int) -> Heads:
        """The part of one of n ranks; raises UserError if it cannot be divided."""
        what = self.divided
        width = {"heads": self.n_kv_head, "query heads": self.n_head, "value columns": self.d_v}
        if width[what] % n:
            raise UserError(
                f"parallel.tp={n}: the {width[what]} {what} of this model cannot be divided by it; "
                "choose another"
            )
        if what == "value columns":
            return replace(self, d_v=self.d_v // n)
        n_kv_head = self.n_kv_head // n if what == "heads" else 1
        return replace(self, n_head=self.n_head // n, n_kv_head=n_kv_head)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines the function a model computes."""

    vocab_size: Width
    """Number of different tokens."""
    d_model: Width
    """Width of the residual stream."""
    n_layer: Depth
    """Transformer layers; each is two gated attention units (shga) or attention + feed-forward."""
    head_type: HeadType = "shga"
    """Single-head gated attention, multi-query, multi-head or grouped-query attention."""
    attention: AttentionType = "vq"
    """Vector-quantized keys in linear time, or full attention in quadratic time."""
    d_k: Width = 128
    """Width of queries and keys, per head."""
    n_kv_head: Width | None = None
    """Key/value heads of gqa; a divisor of d_model / d_k."""
    n_code: Width = 512
    """Codewords per codebook."""
    block_len: Width = 512
    """Tokens per block, and how far the relative positional bias reaches."""
    compressive_cache: bool = True
    """Attend to everything older than the window; False leaves the last block_len tokens only."""
    grad_through_cache: bool = True
    """Let gradients reach values that have been evicted into the cache."""
    p_dropsin: BelowOne = 0.0
    """Dropout on the sinusoids of the relative positions; one mask per sequence."""
    p_dropres: BelowOne = 0.0
    """Dropout on every residual branch."""
    p_droplyr: BelowOne = 0.0
    """Probability of skipping a residual branch for a whole sequence (LayerDrop)."""
    tie_embeddings: bool = False
    """Use the token embeddings as the output projection; without it there is also a bias."""
    final_norm: bool = False
    """Normalise the features before the output projection."""
    logit_scale: Real = 1.0
    """Constant by which the features are multiplied before the output projection."""
    absolute_positions: bool = False
    """Add absolute sinusoids, times a trainable scalar, to the token embeddings."""
    pe_wavelength: Wavelength = 1e5
    """Longest wavelength of the sinusoids."""
    commit_coef: NotNegative = 1e-4
    """Weight of the commitment loss in the training loss."""
    ema_decay: BelowOne = 0.99
    """Decay of the codebooks' running sums and counts."""
    codebook_init: CodebookInit = "keys"
    """Start codebooks from the keys of the first step, or at random as the paper does."""
    revive_below: NotNegative = 0.1
    """Replace codes whose running count falls below this by recent keys; 0 never does."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if abs(self.logit_scale) < 1e-30:
            raise UserError(f"model.logit_scale={self.logit_scale}: must not be 0")
        if self.n_kv_head is not None and self.head_type != "gqa":
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} is for model.head_type=gqa; leave it out"
            )
        _ = self.layer  # checks the rest

    @property
    def layer(self) -> AttentionConfig:
        """The attention of every layer."""
        shared = {f.name for f in fields(AttentionConfig)} & {f.name for f in fields(self)}
        return AttentionConfig(**{name: getattr(self, name) for name in shared})

    @property
    def n_attention(self) -> int:
        """Attention layers per transformer layer: two for SHGA, which has no feed-forward layer."""
        return 2 if self.head_type == "shga" else 1

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward layer, 0 if there is none.

        4 d_model for MHA and 5 d_model for MQA as in the paper; in between for GQA, so that models
        of one width have about the same size.
        """
        heads = self.layer.heads
        if heads.is_gated:
            return 0
        if self.head_type != "gqa":
            return (4 if self.head_type == "mha" else 5) * self.d_model
        saved = (heads.n_head - heads.n_kv_head) / max(heads.n_head - 1, 1)
        return 4 * self.d_model + self.d_k * round(saved * heads.n_head)

    @classmethod
    def from_dict(cls, values: object) -> ModelConfig:
        """Build a model config from its JSON form; raise UserError for anything else."""
        return from_plain(cls, values, "model")


@dataclass(frozen=True)
class OptimConfig:
    """How weights are updated; the defaults are those of the paper's small models."""

    optimizer: OptimizerName = "adamw"
    """AdamW, or Adafactor with steps relative to the size of a parameter."""
    lr: Positive = 4e-4
    """Peak of the learning rate."""
    warmup: Annotated[int, Range(0, 2**40)] = 10_000
    """Updates in which the learning rate climbs from zero to its peak."""
    lr_final_share: Fraction = 0.1
    """What a cosine leaves of the peak at the end of training."""
    weight_decay: BelowOne = 0.0
    """Part of a weight taken off at every update, not multiplied by the learning rate."""
    grad_clip: Positive | None = 0.1
    """Largest norm of all gradients together; None does not clip."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    """Decay of AdamW's first and second moments."""
    eps: Positive = 1e-9
    """AdamW's guard against division by zero."""
    update_clip: Positive = 1.0
    """Largest root mean square of an Adafactor update."""

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        unused = ("update_clip",) if self.optimizer == "adamw" else ("betas", "eps")
        for name in unused:
            if getattr(self, name) != getattr(OptimConfig, name):
                raise UserError(
                    f"optim.{name}={shown(getattr(self, name))}: optim.optimizer={self.optimizer} "
                    "does not use it; leave it out"
                )


@dataclass(frozen=True)
class DataConfig:
    """Which tokens a model learns from."""

    dataset: Dataset = "text"
    """Bytes of a text file or folder (without a path: the sources of Python's standard library),
    enwik8, books as PG-19 has them, ImageNet64 in its npz batches, or a folder of pictures."""
    path: str | None = None
    """File or folder that holds the material."""
    tokenizer: str | None = None
    """An existing SentencePiece .model for books; without it a vocabulary is learned from them."""
    cache: str = "~/.cache/transformer_vq"
    """Folder in which prepared corpora and downloads are kept."""

    def __post_init__(self) -> None:
        check_fields(self, "data")
        if self.tokenizer is not None and self.dataset != "pg19":
            raise UserError(
                f"data.tokenizer={shown(self.tokenizer)}: data.dataset={self.dataset} has its own "
                "tokens; leave it out, or use data.dataset=pg19"
            )

    @property
    def has_pictures(self) -> bool:
        """Tokens are pixels, not text."""
        return self.dataset in ("imagenet64", "pictures")


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes, from its batches to its checkpoints."""

    steps: Count = 125_000
    """Updates of the weights; each sees batch_size * backprop_len tokens."""
    batch_size: Rows = 128
    """Sequences per update."""
    seq_len: Count = 8192
    """Tokens per sequence; the state is carried from its first window to its last."""
    backprop_len: Count = 2048
    """Tokens per window: how far gradients go back."""
    accumulate: Annotated[int, Range(0, 2**24)] = 1
    """Parts into which the batch of an update is divided to save memory; 0 takes as few as fit."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products; weights, codebooks, normalisers and loss stay fp32."""
    reduction: Reduction = "auto"
    """How cache statistics are reduced across blocks; the result is the same up to rounding."""
    checkpoint_activations: bool = False
    """Activation checkpointing: recompute activations in backward; less memory, more time."""
    compile: bool = False
    """Use torch.compile: slow to start, faster afterwards."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Decides the first weights, the order of sequences and every dropout mask."""
    init_from: str | None = None
    """Start from the weights and codebooks of this run, or of this model file."""
    log_every: Count = 1
    """Updates between two lines of metrics.jsonl."""
    eval_every: Count = 1000
    """Updates between two validations; the best model so far is kept."""
    eval_tokens: Count = 1_000_000
    """Tokens from the start of the validation split to validate on."""
    save_every: Count = 1000
    """Updates between two checkpoints; the last update is always saved."""
    keep: Count = 2
    """How many of the newest checkpoints stay on disk."""
    tensorboard: bool = False
    """Write TensorBoard files to RUN/tensorboard too."""
    wandb: str | None = None
    """Log to this Weights & Biases project too."""

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
                f"train.init_from={shown(start)}: there is no such home folder; give a full path"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes that `torchrun` starts share the work; the product is their number."""

    dp: Annotated[int, Range(0, 2**20)] = 0
    """Data parallel: every process a whole model and its own sequences; 0 takes what is left."""
    fsdp: Processes = 1
    """Sharded data parallel: the same, but weights and moments are divided among processes."""
    cp: Processes = 1
    """Context parallel: one sequence in stretches, one after the other, each on a process."""
    tp: Processes = 1
    """Tensor parallel: the widths of every layer are divided among processes."""

    def __post_init__(self) -> None:
        check_fields(self, "parallel")

    @property
    def n_rows(self) -> int:
        """Among how many processes the sequences of a batch are divided."""
        return max(self.dp, 1) * self.fsdp

    @property
    def n_processes(self) -> int:
        return self.n_rows * self.cp * self.tp

    def fill(self, n_processes: int) -> ParallelConfig:
        """The same with `dp` worked out. Raises UserError if the processes cannot be so shared."""
        others = self.fsdp * self.cp * self.tp
        filled = self if self.dp else replace(self, dp=max(n_processes // others, 1))
        if filled.n_processes == n_processes:
            return filled
        asked = f"{filled.dp} x {self.fsdp} x {self.cp} x {self.tp} = {filled.n_processes}"
        raise UserError(
            f"parallel: dp x fsdp x cp x tp = {asked} processes are asked for and {n_processes} "
            f"are there; start with `torchrun --nproc-per-node {filled.n_processes} -m "
            "transformer_vq ...`, or change --parallel.*"
        )


@dataclass(frozen=True)
class RunConfig:
    """A whole run; a preset is one of these."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_dict(cls, values: object) -> RunConfig:
        """Build a run config from its JSON form; raise UserError for anything else."""
        return from_plain(cls, values)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Fields in which two runs differ, as `part.field`, with both values."""
        found = {}
        for part in fields(self):
            ours, theirs = getattr(self, part.name), getattr(other, part.name)
            for name, value in asdict(ours).items():
                if value != getattr(theirs, name):
                    found[f"{part.name}.{name}"] = (value, getattr(theirs, name))
        return found
