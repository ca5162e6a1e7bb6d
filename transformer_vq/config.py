"""What a model and a run are made of: frozen dataclasses, checked when they are built."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

HeadType = Literal["shga", "mqa", "mha"]
AttentionType = Literal["vq", "full"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan"]
CodebookInit = Literal["random", "keys"]
OptimizerName = Literal["adamw", "adafactor"]
Dataset = Literal["text", "enwik8", "pg19", "imagenet64", "pictures"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines the function a model computes."""

    vocab_size: int
    """Number of different tokens."""
    d_model: int
    """Width of the residual stream."""
    n_layer: int
    """Transformer layers; each is two gated attention units (shga) or attention + feed-forward."""
    head_type: HeadType = "shga"
    """Single-head gated attention, multi-query or multi-head attention."""
    attention: AttentionType = "vq"
    """Vector-quantized keys in linear time, or full attention in quadratic time."""
    reduction: Reduction = "auto"
    """How cache statistics are summed across blocks; the result is the same."""
    d_k: int = 128
    """Width of queries and keys, per head."""
    n_code: int = 512
    """Codewords per codebook."""
    block_len: int = 512
    """Tokens per block, and how far the relative positional bias reaches."""
    compressive_cache: bool = True
    """Attend to everything older than the window; False leaves the last block_len tokens only."""
    grad_through_cache: bool = True
    """Let gradients reach values that have moved into the cache."""
    p_dropsin: float = 0.0
    """Dropout on the sinusoids of the relative positions; one mask per sequence."""
    p_dropres: float = 0.0
    """Dropout on every residual branch."""
    p_droplyr: float = 0.0
    """Probability of skipping a residual branch for a whole sequence (LayerDrop)."""
    tie_embeddings: bool = False
    """Use the token embeddings as the output projection; without it there is also a bias."""
    final_norm: bool = False
    """Normalise the features before the output projection."""
    logit_scale: float = 1.0
    """Constant by which the features are multiplied before the output projection."""
    absolute_positions: bool = False
    """Add absolute sinusoids, times a trainable scalar, to the token embeddings."""
    pe_wavelength: float = 1e5
    """Longest wavelength of the sinusoids."""
    commit_coef: float = 1e-4
    """Weight of the commitment loss in the training loss."""
    ema_decay: float = 0.99
    """Decay of the codebooks' running sums and counts."""
    codebook_init: CodebookInit = "random"
    """Start codebooks at random as the paper does, or from the keys of the first update."""
    revive_below: float = 0.0
    """Replace codes whose running count falls below this by recent keys; 0 never does."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("vocab_size", "d_model", "n_layer", "d_k", "n_code", "block_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("p_dropsin", "p_dropres", "p_droplyr", "ema_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 0 and below 1")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model}: must be even, half sines and half cosines")
        if self.head_type != "shga" and self.d_model % self.d_k:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of d_k={self.d_k}, as "
                f"head_type={self.head_type!r} needs; change one of them or use 'shga'"
            )
        if self.pe_wavelength <= 1:
            raise ValueError(f"pe_wavelength={self.pe_wavelength!r}: must be above 1")
        if self.commit_coef < 0 or self.revive_below < 0:
            raise ValueError("commit_coef and revive_below must not be negative")


@dataclass(frozen=True)
class OptimConfig:
    """How weights are updated; the defaults are those of the paper's small models."""

    optimizer: OptimizerName = "adamw"
    """AdamW, or Adafactor with steps relative to the size of a parameter."""
    lr: float = 4e-4
    """Peak of the learning rate."""
    warmup: int = 10_000
    """Updates in which the learning rate climbs from zero to its peak."""
    lr_final_share: float = 0.1
    """What a cosine leaves of the peak at the end of training."""
    weight_decay: float = 0.0
    """Part of a weight taken off at every update, not multiplied by the learning rate."""
    grad_clip: float | None = 0.1
    """Largest norm of all gradients together; None does not clip."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's first and second moments."""
    eps: float = 1e-9
    """AdamW's guard against division by zero."""
    update_clip: float = 1.0
    """Largest root mean square of an Adafactor update."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("lr", "eps", "update_clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be above 0")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ValueError(f"grad_clip={self.grad_clip!r}: must be above 0, or None")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup!r}: must not be negative")
        if not 0 <= self.weight_decay < 1:
            raise ValueError(f"weight_decay={self.weight_decay!r}: must be at least 0 and below 1")
        if not 0 <= self.lr_final_share <= 1:
            raise ValueError(f"lr_final_share={self.lr_final_share!r}: must be from 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas!r}: must be at least 0 and below 1")


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
        _check_choices(self)

    @property
    def has_pictures(self) -> bool:
        """Tokens are pixels, not text."""
        return self.dataset in ("imagenet64", "pictures")


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes, from its batches to its checkpoints."""

    steps: int = 125_000
    """Updates of the weights; each sees batch_size * backprop_len tokens."""
    batch_size: int = 128
    """Sequences per update."""
    seq_len: int = 8192
    """Tokens per sequence; the state is carried from its first window to its last."""
    backprop_len: int = 2048
    """Tokens per window: how far gradients go back."""
    accumulate: int = 1
    """Parts into which the batch of an update is divided to save memory; 0 takes as few as fit."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products; weights, codebooks, normalisers and loss stay fp32."""
    recompute: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    compile: bool = False
    """Use torch.compile: slow to start, faster afterwards."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    seed: int = 0
    """Decides the first weights, the order of sequences and every dropout mask."""
    init_from: str | None = None
    """Start from the weights and codebooks of this run, or of this model file."""
    log_every: int = 1
    """Updates between two lines of metrics.jsonl."""
    eval_every: int = 1000
    """Updates between two validations; the best model so far is kept."""
    eval_tokens: int = 1_000_000
    """Tokens from the start of the validation split to validate on."""
    save_every: int = 1000
    """Updates between two checkpoints; the last update is always saved."""
    keep: int = 2
    """How many of the newest checkpoints stay on disk."""
    tensorboard: bool = False
    """Write TensorBoard files to RUN/tensorboard too."""
    wandb: str | None = None
    """Log to this Weights & Biases project too."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in (
            *("steps", "batch_size", "seq_len", "backprop_len"),
            *("log_every", "eval_every", "eval_tokens", "save_every", "keep"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        if self.seq_len % self.backprop_len:
            raise ValueError(
                f"seq_len={self.seq_len} is not a multiple of backprop_len={self.backprop_len}: a "
                "sequence is worked on in whole windows"
            )
        if not isinstance(self.accumulate, int) or self.accumulate < 0:
            raise ValueError(f"accumulate={self.accumulate!r}: must be a whole number, or 0")
        if self.accumulate and self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided into accumulate={self.accumulate} "
                "equal parts"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must not be negative, and below 2^63")


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes that `torchrun` starts share the work; the product is their number."""

    dp: int = 0
    """Data parallel: every process a whole model and its own sequences; 0 takes what is left."""
    fsdp: int = 1
    """Sharded data parallel: the same, but weights and moments are divided among processes."""
    cp: int = 1
    """Context parallel: one sequence in stretches, one after the other, each on a process."""
    tp: int = 1
    """Tensor parallel: the widths of every layer are divided among processes."""

    def __post_init__(self) -> None:
        for name, least in (("dp", 0), ("fsdp", 1), ("cp", 1), ("tp", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"parallel.{name}={value!r}: must be a whole number of at least {least}"
                )

    @property
    def n_rows(self) -> int:
        """Among how many processes the sequences of a batch are divided."""
        return max(self.dp, 1) * self.fsdp

    @property
    def n_processes(self) -> int:
        return self.n_rows * self.cp * self.tp

    def fill(self, n_processes: int) -> ParallelConfig:
        """The same with `dp` worked out. Raises ValueError if the processes cannot be so shared."""
        others = self.fsdp * self.cp * self.tp
        filled = self if self.dp else replace(self, dp=max(n_processes // others, 1))
        if filled.n_processes == n_processes:
            return filled
        asked = f"{filled.dp} x {self.fsdp} x {self.cp} x {self.tp} = {filled.n_processes}"
        raise ValueError(
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """What `to_dict` made, also after a way through JSON."""
        parts = dict(values)
        optim = dict(parts.get("optim", {}))
        if "betas" in optim:
            optim["betas"] = tuple(optim["betas"])
        try:
            return cls(
                model=ModelConfig(**parts["model"]),
                data=DataConfig(**parts.get("data", {})),
                optim=OptimConfig(**optim),
                train=TrainConfig(**parts.get("train", {})),
                parallel=ParallelConfig(**parts.get("parallel", {})),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the config of a run: {error}") from error

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Fields in which two runs differ, as `part.field`, with both values."""
        found = {}
        for part in fields(self):
            ours, theirs = getattr(self, part.name), getattr(other, part.name)
            for name, value in asdict(ours).items():
                if value != getattr(theirs, name):
                    found[f"{part.name}.{name}"] = (value, getattr(theirs, name))
        return found


def _check_choices(config: object) -> None:
    """Every field whose type is a list of words holds one of them."""
    for name, hint in get_type_hints(type(config)).items():
        choices = get_args(hint)
        if get_origin(hint) is Literal and getattr(config, name) not in choices:
            raise ValueError(f"{name}={getattr(config, name)!r}: choose one of {choices}")
