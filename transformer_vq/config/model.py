"""Model configs: what determines the function a model computes, and its training."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from transformer_vq.config.checks import Range, check_fields, from_plain
from transformer_vq.errors import UserError

HeadType = Literal["shga", "mqa", "mha", "gqa"]
AttentionType = Literal["vq", "full"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan", "triton"]
CodebookInit = Literal["random", "keys"]

# High limits make absurd values fail at once; all positive floats are normal numbers in float32.
Width = Annotated[int, Range(1, 2**24)]
Depth = Annotated[int, Range(1, 2**12)]
Real = Annotated[float, Range(-1e30, 1e30)]
NotNegative = Annotated[float, Range(0, 1e30)]
BelowOne = Annotated[float, Range(0, 1, below=True)]
Wavelength = Annotated[float, Range(1, 1e30, above=True)]


@dataclass(frozen=True, kw_only=True)
class _AttentionFields:
    """Settings of the attention that layers and whole models have in common."""

    head_type: HeadType = "shga"
    """Single-head gated attention, multi-query, multi-head or grouped-query attention."""
    attention: AttentionType = "vq"
    """Vector-quantized keys in linear time, or full attention in quadratic time."""
    d_k: Width = 128
    """Width of queries and keys, per head."""
    n_kv_head: Width | None = None
    """Key/value heads of gqa; a divisor of the number of query heads."""
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
    n_head: Width | None = None
    """Query heads; d_model / d_k by default, 1 for shga."""
    d_v: Annotated[int, Range(1, 2**25)] | None = None
    """Width of values, per key/value head; d_k by default, 2 d_model for shga."""
    norm_input: bool = True
    """Apply RMSNorm to the input of the layer."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.d_model % 2:
            raise UserError(f"d_model={self.d_model}: must be even")
        is_gated = self.head_type == "shga"
        if self.n_head is None and not is_gated and self.d_model % self.d_k:
            raise UserError(
                f"d_model={self.d_model} is not a multiple of d_k={self.d_k}, as "
                f"head_type={self.head_type} needs; change one of them or use shga"
            )
        n_head = self.n_head or (1 if is_gated else self.d_model // self.d_k)
        n_kv_head = self.n_kv_head or {"gqa": 0, "mha": n_head}.get(self.head_type, 1)
        if n_kv_head == 0:
            raise UserError("head_type=gqa needs n_kv_head, the number of key heads")
        if is_gated and max(n_head, n_kv_head) > 1:
            raise UserError(
                f"head_type=shga has one head, not {max(n_head, n_kv_head)}; use mha, mqa or gqa"
            )
        possible = {"shga": True, "mqa": n_kv_head == 1}
        possible |= {"mha": n_kv_head == n_head, "gqa": n_head % n_kv_head == 0}
        if not possible[self.head_type]:
            raise UserError(
                f"n_kv_head={n_kv_head} is incompatible with the {n_head} query heads of "
                f"head_type={self.head_type}; leave it out, or use gqa and a divisor of "
                f"{n_head}"
            )
        object.__setattr__(self, "n_head", n_head)
        object.__setattr__(self, "n_kv_head", n_kv_head)
        object.__setattr__(self, "d_v", self.d_v or (2 * self.d_model if is_gated else self.d_k))

    @classmethod
    def for_layer(cls, d_model: int, **options: Any) -> AttentionConfig:
        """Return the config of a layer on its own: heads that fit d_model and each other.

        Several heads without a head_type are mha, or gqa if n_kv_head is given. d_k is then
        d_model / n_head by default; without n_head, the largest divisor of d_model up to 128.
        """
        n_head, n_kv_head = options.get("n_head"), options.get("n_kv_head")
        sizes = (d_model, n_head or 1, n_kv_head or 1)
        if not all(type(size) is int and size > 0 for size in sizes):
            return cls(d_model, **options)  # raises an error
        if max(sizes[1:]) > 1:
            options = {"head_type": "mha" if n_kv_head is None else "gqa"} | options
        if options.get("head_type", cls.head_type) != "shga" and "d_k" not in options:
            if n_head and d_model % n_head:
                raise UserError(
                    f"d_model={d_model} is not a multiple of n_head={n_head}; change one of them "
                    "or give d_k"
                )
            options["d_k"] = d_model // n_head if n_head else _default_d_k(*sizes[::2])
        return cls(d_model, **options)

    @property
    def heads(self) -> Heads:
        """The head geometry, fully determined."""
        assert self.n_head is not None
        assert self.n_kv_head is not None
        assert self.d_v is not None
        return Heads(self.n_head, self.n_kv_head, self.d_k, self.d_v, self.head_type == "shga")


def _default_d_k(d_model: int, n_kv_head: int) -> int:
    """Return the largest width up to 128 whose number of heads is a multiple of n_kv_head."""
    widths = range(min(_AttentionFields.d_k, d_model), 0, -1)
    return next((d for d in widths if d_model % (d * n_kv_head) == 0), 1)


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
    def sharded(self) -> Literal["heads", "query heads", "value columns"]:
        """What tensor parallelism shards: the first of the three that there are several of."""
        if self.n_kv_head > 1:
            return "heads"
        return "query heads" if self.n_head > 1 else "value columns"

    def shard(self, n: int) -> Heads:
        """The geometry of one of n ranks; raises UserError if n does not divide it."""
        what = self.sharded
        width = {"heads": self.n_kv_head, "query heads": self.n_head, "value columns": self.d_v}
        if width[what] % n:
            raise UserError(
                f"parallel.tp={n}: does not divide the {width[what]} {what} of this model; choose "
                "a divisor"
            )
        if what == "value columns":
            return replace(self, d_v=self.d_v // n)
        n_kv_head = self.n_kv_head // n if what == "heads" else 1
        return replace(self, n_head=self.n_head // n, n_kv_head=n_kv_head)


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
    commit_coef: NotNegative = 1e-2
    """Weight of the commitment loss in the training loss; 1e-4 in the paper."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if abs(self.logit_scale) < 1e-30:
            raise UserError(f"model.logit_scale={self.logit_scale}: must not be 0")
        if self.n_kv_head is not None and self.head_type != "gqa":
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} is for model.head_type=gqa; leave it out"
            )
        try:
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
