"""What a model and a run are made of: frozen dataclasses, checked when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

HeadType = Literal["shga", "mqa", "mha"]
AttentionType = Literal["vq", "full"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan"]
CodebookInit = Literal["random", "keys"]
OptimizerName = Literal["adamw", "adafactor"]


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
class RunConfig:
    """A whole run; a preset is one of these."""

    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)


def _check_choices(config: object) -> None:
    """Every field whose type is a list of words holds one of them."""
    hints = get_type_hints(type(config))
    for name, hint in hints.items():
        choices = get_args(hint)
        if get_origin(hint) is Literal and getattr(config, name) not in choices:
            raise ValueError(f"{name}={getattr(config, name)!r}: choose one of {choices}")
