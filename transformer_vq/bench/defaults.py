"""Default settings of the benchmarks. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from transformer_vq.bench.records import StepKind
from transformer_vq.config import HeadType, ModelConfig, Precision, RunConfig, TrainConfig
from transformer_vq.presets import PRESETS

# tvq bench train
Checkpointing = Literal["auto", "on", "off"]
KINDS: tuple[StepKind, ...] = tuple(x for x in get_args(StepKind) if x != "triton")
HEAD_TYPES: tuple[HeadType, ...] = ("shga", "mqa", "mha")  # the head types of the paper
LENGTHS: tuple[int, ...] = (2048, 8192, 32_768, 131_072)
REPEATS = 3
QUICK_KINDS: tuple[StepKind, ...] = ("full", "sdpa", "auto")
QUICK_LENGTHS: tuple[int, ...] = (2048, 8192)
QUICK_REPEATS = 2

# tvq bench context
CONTEXT_TIME_LIMIT = 600.0  # seconds

# tvq bench ablate
CODES = (8, 32, 128)
_TINY = PRESETS["tiny"]
ABLATION_BASE = replace(
    _TINY,
    model=replace(_TINY.model, block_len=16, n_code=128, ema_decay=0.95),
    train=replace(
        _TINY.train,
        batch_size=4,
        seq_len=512,
        steps=2400,
        eval_every=800,
        save_every=800,
        eval_tokens=100_000,
    ),
)
"""Sequences of 32 blocks; 5 to 7 minutes per run on two cores.

Blocks are shorter and runs are longer than in `tiny`, because long-range attention hurts early in
training. It helps only after the model has learned short-range structure.
"""

# tvq bench profile
PROFILE_BASE = RunConfig(
    ModelConfig(vocab_size=256, d_model=768, n_layer=1),
    train=TrainConfig(batch_size=1, seq_len=8192, backprop_len=2048),
)
"""One layer of the paper's 190M model, with the backprop length of the paper."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the batch of a training step; by default one layer of the paper's 190M model.

    Field docstrings are the help texts of `tvq bench train` and `tvq bench documents`.
    """

    d_model: int = 768
    """Width of the residual stream."""
    n_layer: int | None = None
    """Transformer layers; by default 1 on a CPU and 24, as in the paper, on a GPU."""
    d_k: int = 128
    """Width of queries and keys, per head."""
    n_kv_head: int | None = None
    """Key/value heads of gqa."""
    n_code: int = 512
    """Codewords per codebook."""
    block_len: int = 512
    """Tokens per block."""
    vocab_size: int = 256
    """Vocabulary size."""
    batch_size: int = 1
    """Sequences per step."""
    precision: Precision = "fp32"
    """Precision of matrix products: fp32 or bf16."""
    device: str = "auto"
    """cpu, cuda, ...; auto uses a GPU if one is available."""


TRAIN_SHAPE = Shape()
DOCUMENTS_SHAPE = Shape(d_model=256, n_layer=2)
