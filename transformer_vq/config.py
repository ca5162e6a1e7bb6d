"""Configs of models and runs: frozen dataclasses that check their values when built."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from transformer_vq.checks import Range, check_fields, from_plain, shown
from transformer_vq.errors import UserError

HeadType = Literal["shga", "mqa", "mha", "gqa"]
AttentionType = Literal["vq", "full"]
Position = Literal["xl", "rope"]
Biases = Literal["none", "qkv", "all"]
FeedForwardType = Literal["relu2", "swiglu"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan"]
Backend = Literal["auto", "eager", "triton"]
CodebookInit = Literal["random", "keys"]
Dataset = Literal["text", "enwik8", "pg19", "imagenet64", "images"]
Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
LEARNED = ("bpe",)  # tokenizers that are learned from the training data
OptimizerName = Literal["adamw", "adafactor", "muon"]
Schedule = Literal["cosine", "wsd"]
Precision = Literal["fp32", "bf16"]

# High limits make absurd values fail at once; all positive floats are normal numbers in float32.
Width = Annotated[int, Range(1, 2**24)]
Depth = Annotated[int, Range(1, 2**12)]
Rows = Annotated[int, Range(1, 2**24)]
Count = Annotated[int, Range(1, 2**40)]
Processes = Annotated[int, Range(1, 2**20)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Real = Annotated[float, Range(-1e30, 1e30)]
Positive = Annotated[float, Range(1e-30, 1e30)]
NotNegative = Annotated[float, Range(0, 1e30)]
Fraction = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, below=True)]
BelowHalf = Annotated[float, Range(0, 0.5, below=True)]
Wavelength = Annotated[float, Range(2, 1e30)]


@dataclass(frozen=True, kw_only=True)
class _AttentionFields:
    """Settings of the attention that layers and whole models have in common."""

    head_type: HeadType = "shga"
    """Single-head gated attention, multi-query, multi-head or grouped-query attention."""
    attention: AttentionType = "vq"
    """Vector-quantized keys in linear time, or full attention in quadratic time."""
    d_k: Width = 128
    """Width of queries and keys, per head."""
    n_head: Width | None = None
    """Query heads; d_model / d_k by default, 1 for shga."""
    n_kv_head: Width | None = None
    """Key/value heads of gqa; a divisor of the number of query heads."""
    position: Position = "xl"
    """Transformer-XL scores within block_len as in the paper, or rotary positions (RoPE): relative
    ones within block_len, and a single constant one beyond it."""
    rope_theta: Annotated[float, Range(1, 1e30)] = 1e4
    """Base of the rotary frequencies."""
    far_position: Count | None = None
    """Relative position of all keys beyond block_len (rope); twice block_len by default."""
    n_sink: Annotated[int, Range(0, 2**24)] = 0
    """First tokens of a document that stay exact after eviction: attention sinks (rope)."""
    n_exact: Annotated[int, Range(0, 2**24)] = 0
    """Evicted tokens that stay exact because their codes represent them worst (rope)."""
    quantize_window: bool = True
    """Quantize keys at once, as in the paper, or only when they are evicted (rope)."""
    norm_gain: bool = False
    """Give every RMSNorm a trainable gain."""
    norm_eps: Annotated[float, Range(1e-30, 1)] = 1e-6
    """Epsilon of every RMSNorm."""
    qk_norm: bool = True
    """Apply RMSNorm to queries and keys, per head."""
    proj_bias: Biases = "none"
    """Biases of the projections: none, of queries, keys and values, or of the output as well."""
    n_code: Width = 512
    """Codewords per codebook."""
    block_len: Width = 512
    """Tokens per block; also the range of the relative positional bias."""
    compressive_cache: bool = True
    """Attend to all earlier tokens; if False, only to the last block_len tokens."""
    grad_through_cache: bool = True
    """Propagate gradients to values that have been evicted into the cache."""
    p_dropsin: BelowOne = 0.0
    """Dropout on the sinusoids of the relative positions; one mask per sequence."""
    pe_wavelength: Wavelength = 1e5
    """Longest wavelength of the sinusoids."""
    ema_decay: BelowOne = 0.99
    """Decay of the codebooks' running sums and counts."""
    codebook_init: CodebookInit = "keys"
    """Initialize codebooks from the keys of the first step, or at random as in the paper."""
    revive_below: NotNegative = 0.1
    """Replace codes whose running count falls below this with recent keys; 0 disables it."""


@dataclass(frozen=True)
class AttentionConfig(_AttentionFields):
    """One attention layer: heads, widths and codebook. The single owner of head geometry.

    `head_type` determines the fields left at None: one wide gated head (shga), one key/value head
    for all query heads (mqa), one per query head (mha), or `n_kv_head` of them (gqa).
    """

    d_model: Width
    """Width of the residual stream."""
    d_v: Annotated[int, Range(1, 2**25)] | None = None
    """Width of values, per key/value head; d_k by default, 2 d_model for shga."""
    norm_input: bool = True
    """Apply RMSNorm to the input of the layer."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.d_model % 2:
            raise UserError(f"d_model={self.d_model}: must be even")
        is_gated = self.head_type == "shga"
        if self.n_head is None and not is_gated:
            _check_multiple("", d_model=self.d_model, d_k=self.d_k)
        n_head = self.n_head or (1 if is_gated else self.d_model // self.d_k)
        n_kv_head = self.n_kv_head or {"gqa": 0, "mha": n_head}.get(self.head_type, 1)
        possible = {"shga": n_head == n_kv_head == 1, "mqa": n_kv_head == 1}
        possible |= {"mha": n_kv_head == n_head, "gqa": n_kv_head > 0 and n_head % n_kv_head == 0}
        if not possible[self.head_type]:
            raise UserError(
                f"n_kv_head={self.n_kv_head} is incompatible with head_type={self.head_type} and "
                f"{n_head} query heads; gqa needs a divisor of {n_head}, shga has one head"
            )
        object.__setattr__(self, "n_head", n_head)
        object.__setattr__(self, "n_kv_head", n_kv_head)
        object.__setattr__(self, "d_v", self.d_v or (2 * self.d_model if is_gated else self.d_k))
        self._check_position()

    def _check_position(self) -> None:
        """Raise UserError for settings that the kind of positions does not use or allow."""
        if self.position == "xl":
            names = ("rope_theta", "far_position", "n_sink", "n_exact", "quantize_window")
            _check_unused(self, "", names, "position=xl")
            return
        _check_unused(self, "", ("pe_wavelength", "p_dropsin"), "position=rope")
        if self.d_k % 2:
            raise UserError(f"d_k={self.d_k}: must be even for position=rope")
        if self.attention == "full" or self.quantize_window:
            why = "attention=full" if self.attention == "full" else "quantize_window=True"
            _check_unused(self, "", ("n_sink", "n_exact"), why)
        if self.n_exact and not self.compressive_cache:
            raise UserError(f"n_exact={self.n_exact} needs compressive_cache=True; use n_sink")

    @property
    def distant(self) -> int:
        """The relative position of keys beyond block_len, for position=rope."""
        return 2 * self.block_len if self.far_position is None else self.far_position

    @classmethod
    def for_layer(cls, d_model: int, **options: Any) -> AttentionConfig:
        """Return the config of a layer on its own: heads that fit d_model and each other.

        Several heads without a head_type are mha, or gqa if n_kv_head is given. d_k is then
        d_model / n_head by default; without n_head, the largest divisor of d_model up to 128.
        """
        n_head, n_kv_head = options.get("n_head"), options.get("n_kv_head")
        if (n_head or n_kv_head or 1) != 1:
            options = {"head_type": "mha" if n_kv_head is None else "gqa"} | options
        if options.get("head_type", cls.head_type) != "shga" and "d_k" not in options:
            _check_multiple("", d_model=d_model, n_head=n_head or 1)
            n = n_head or n_kv_head or 1
            widths = [d_model // n] if n_head else range(min(cls.d_k, d_model), 0, -1)
            options["d_k"] = next((d for d in widths if d_model % (d * n) == 0), 1)
        return cls(d_model, **options)

    @property
    def heads(self) -> Heads:
        """The head geometry, fully determined."""
        of: Any = self  # __post_init__ has set what may be None
        return Heads(of.n_head, of.n_kv_head, of.d_k, of.d_v, self.head_type == "shga")


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


@dataclass(frozen=True)
class ModelConfig(_AttentionFields):
    """Everything that determines the function a model computes, and its training."""

    vocab_size: Width
    """Vocabulary size."""
    d_model: Width
    """Width of the residual stream."""
    n_layer: Depth
    """Transformer layers; each is two gated attention units (shga) or attention + feed-forward."""
    p_dropres: BelowOne = 0.0
    """Dropout on every residual branch."""
    p_droplyr: BelowOne = 0.0
    """Probability of skipping a residual branch for a whole sequence (LayerDrop)."""
    tie_embeddings: bool = False
    """Share the token embeddings with the output projection; untied, it also has a bias."""
    final_norm: bool = False
    """Apply RMSNorm before the output projection."""
    logit_scale: Real = 1.0
    """Constant factor applied to the features before the output projection."""
    absolute_positions: bool = False
    """Add absolute sinusoids, times a trainable scalar, to the token embeddings."""
    head_bias: bool = True
    """Give an untied output projection a bias."""
    feed_forward: FeedForwardType = "relu2"
    """Feed-forward layers of mqa, mha and gqa: squared ReLU as in the paper, or SwiGLU."""
    d_ff: Width | None = None
    """Width of the feed-forward layers; 4 d_model for mha, 5 d_model for mqa, in between for gqa;
    two thirds of that for swiglu."""
    commit_coef: NotNegative = 1e-2
    """Weight of the commitment loss in the training loss; 1e-4 in the paper."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        try:
            if self.head_type == "shga":
                _check_unused(self, "", ("feed_forward", "d_ff"), "head_type=shga")
            if self.tie_embeddings:
                _check_unused(self, "", ("head_bias",), "tie_embeddings=True")
            _ = self.layer  # checks the rest
        except UserError as error:
            names = "|".join(f.name for f in fields(self))
            raise UserError(re.sub(rf"\b({names})\b", r"model.\1", str(error))) from None

    @property
    def layer(self) -> AttentionConfig:
        """The attention of every layer."""
        shared = {f.name: getattr(self, f.name) for f in fields(_AttentionFields)}
        return AttentionConfig(self.d_model, **shared)

    @property
    def n_attention(self) -> int:
        """Attention layers per transformer layer: two for SHGA, which has no feed-forward layer."""
        return 2 if self.head_type == "shga" else 1

    @property
    def feed_forward_width(self) -> int:
        """Width of the feed-forward layer, 0 if there is none."""
        heads = self.layer.heads
        if heads.is_gated or self.d_ff is not None:
            return self.d_ff or 0
        width = (4 if self.head_type == "mha" else 5) * self.d_model
        if self.head_type == "gqa":
            saved = (heads.n_head - heads.n_kv_head) / max(heads.n_head - 1, 1)
            width = 4 * self.d_model + self.d_k * round(saved * heads.n_head)
        return width if self.feed_forward == "relu2" else -(-2 * width // 3)

    @classmethod
    def from_dict(cls, values: object) -> ModelConfig:
        """Build a model config from its JSON form; raise UserError for anything else."""
        return from_plain(cls, values, "model")


def _check_unused(config: object, part: str, names: Iterable[str], setting: str) -> None:
    """Raise UserError for fields that are given although another setting does not use them."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(type(config), name):
            where = f"{part}.{name}" if part else name
            problem = f"{where}={shown(value)}: {setting} does not use it"
            raise UserError(f"{problem}; leave it out")


def _check_multiple(part: str, **sizes: int) -> None:
    """Raise UserError unless the first of two fields is a multiple of the second."""
    (name, size), (of, divisor) = sizes.items()
    if size % divisor:
        problem = f"{part}{name}={size} is not a multiple of {part}{of}={divisor}"
        raise UserError(f"{problem}; change one of them")


@dataclass(frozen=True)
class DataConfig:
    """Training data."""

    dataset: Dataset = "text"
    """text: documents of any format (default: the sources of Python's standard library).
    enwik8. pg19: books in PG-19's folders. imagenet64: ImageNet64 npz files. images: a folder of
    images."""
    path: tuple[str, ...] = ()
    """Files, folders or patterns such as 'data/*.jsonl.gz'; - reads standard input, hf:NAME a
    dataset from the Hugging Face Hub."""
    validation_path: tuple[str, ...] = ()
    """Text for validation. If given, no training text is used for it."""
    test_path: tuple[str, ...] = ()
    """Text for testing. If given, no training text is used for it."""
    validation_share: BelowHalf = 0.05
    """Share of the text for validation, unless --data.validation-path is given."""
    test_share: BelowHalf = 0.05
    """Share of the text for testing, unless --data.test-path is given."""
    format: Format = "auto"
    """Format of text files; auto recognizes it by the suffix of the name."""
    text_field: str | None = None
    """Field or column with the text; None uses "text", or the only field that holds text."""
    tokenizer: str | None = None
    """bytes; bpe: a vocabulary learned from the training text; or a file or folder: a SentencePiece
    .model or a Hugging Face tokenizer. None uses bytes; pg19 has no default."""
    end_of_document: bool = True
    """Train on a token that ends each document, so that generation stops by itself. Text only."""
    cache: str | None = None
    """Folder for prepared corpora and downloads. None uses $XDG_CACHE_HOME/transformer_vq, by
    default ~/.cache/transformer_vq."""

    def __post_init__(self) -> None:
        for name in ("path", "validation_path", "test_path"):
            if isinstance(path := getattr(self, name), str):  # a single path may be a string
                object.__setattr__(self, name, (path,))
        check_fields(self, "data")
        if self.dataset == "text":
            return
        only_text = ["validation_path", "test_path", "validation_share", "test_share"]
        only_text += ["format", "text_field"]
        if self.has_images:
            only_text.append("tokenizer")
        _check_unused(self, "data", only_text, f"data.dataset={self.dataset}")
        if len(self.path) > 1:
            raise UserError(f"data.dataset={self.dataset} is read from a single --data.path")

    @property
    def cache_folder(self) -> str:
        """The folder for prepared corpora and downloads; it may start with `~`."""
        if self.cache is not None:
            return self.cache
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification ignores relative paths.
        return os.path.join(base if os.path.isabs(base) else "~/.cache", "transformer_vq")

    @property
    def has_images(self) -> bool:
        """Whether tokens are pixels, not text."""
        return self.dataset in ("imagenet64", "images")

    @property
    def ends_documents(self) -> bool:
        """Whether an end-of-document token follows each document."""
        return self.end_of_document and not self.has_images

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer with its default filled in: bytes, bpe or a path."""
        return "bytes" if self.tokenizer is None else self.tokenizer


# Fields that may change when a run is resumed without affecting its result: the data may move, and
# logs, validations and checkpoints do not affect the training. The device, `compile`, `reduction`,
# `checkpoint_activations` and the mesh affect rounding only.
NEUTRAL_FIELDS = frozenset(
    {
        *("data.path", "data.validation_path", "data.test_path", "data.cache"),
        *("train.device", "train.compile"),
        *("train.reduction", "train.backend", "train.checkpoint_activations"),
        *("train.log_every", "train.eval_every", "train.eval_tokens", "train.save_every"),
        *("train.async_save", "train.keep", "train.tensorboard", "train.wandb"),
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
        _check_unused(self, "optim", unused, f"optim.optimizer={self.optimizer}")
        if self.schedule != "wsd":
            _check_unused(self, "optim", ("decay_share",), f"optim.schedule={self.schedule}")

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
    """Tokens per sequence; the state is carried from the first span to the last."""
    backprop_len: Count = 2048
    """Tokens per span of truncated backpropagation through time."""
    weight_average: BelowOne = 0.0
    """Decay of an exponential moving average of the weights, which is then validated and saved as
    the best model; 0 disables it."""
    accumulate: Annotated[int, Range(0, 2**24)] = 1
    """Gradient accumulation: micro-batches per step; 0 chooses the fewest that fit in memory."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products; weights, codebooks, softmax and loss stay fp32."""
    reduction: Reduction = "auto"
    """How cache statistics are reduced across blocks; results agree up to rounding."""
    backend: Backend = "auto"
    """PyTorch operations (eager), or GPU kernels (triton), which need the extra `triton`."""
    checkpoint_activations: bool = False
    """Activation checkpointing: less memory, more time."""
    compile: bool | None = None
    """Use torch.compile: slow start, then faster steps; by default on GPUs only."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if available."""
    seed: Seed = 0
    """Random seed for initial weights, data order and dropout."""
    init_from: str | None = None
    """Fine-tune: initialize weights and codebooks from this run, model file or exported folder."""
    log_every: Count = 1
    """Steps between two rows in metrics.jsonl."""
    eval_every: Count = 1000
    """Steps between validations; the best model so far is kept."""
    eval_tokens: Count = 1_000_000
    """Validation tokens, taken from the start of the split."""
    save_every: Count = 1000
    """Steps between checkpoints; the last step is always saved."""
    async_save: bool = False
    """Write checkpoints in the background; needs memory for a copy of what they contain."""
    keep: Count = 2
    """Number of newest checkpoints to keep; wsd also keeps the one before its decay."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""

    def __post_init__(self) -> None:
        check_fields(self, "train")
        _check_multiple("train.", seq_len=self.seq_len, backprop_len=self.backprop_len)
        _check_multiple("train.", batch_size=self.batch_size, accumulate=self.accumulate or 1)


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
        asked = f"dp x fsdp x cp x tp = {asked} processes requested"
        command = f"torchrun --nproc-per-node {filled.n_processes} -m transformer_vq ..."
        fix = f"start with `{command}`, or change --parallel.*"
        raise UserError(f"parallel: {asked}, but {n_processes} are running; {fix}")


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
            problem = f"the decay of optim.schedule=wsd starts at step {start}"
            fix = "use a shorter --optim.warmup, a smaller --optim.decay-share or more steps"
            raise UserError(f"optim.warmup={self.optim.warmup}: {problem}; {fix}")

    @classmethod
    def from_dict(cls, values: object) -> RunConfig:
        """Build a run config from its JSON form; raise UserError for anything else."""
        return from_plain(cls, values)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, as `section.field`, with both values."""
        pairs = {
            f"{section}.{name}": (value, getattr(getattr(other, section), name))
            for section, part in self.to_dict().items()
            for name, value in part.items()
        }
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}
