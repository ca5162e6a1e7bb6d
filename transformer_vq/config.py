"""What a model and a run are made of: frozen dataclasses, checked when they are built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

HeadType = Literal["shga", "mqa", "mha"]
AttentionType = Literal["vq", "full"]
Reduction = Literal["auto", "serial", "matmul", "associative", "input_scan"]
CodebookInit = Literal["random", "keys"]


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
        hints = get_type_hints(type(self))
        for name in (f.name for f in fields(self)):
            choices = get_args(hints[name])
            if choices and getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {choices}")
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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run; a preset is one of these."""

    model: ModelConfig
