"""The paper's hyperparameter table as data."""

from __future__ import annotations

from dataclasses import replace

from transformer_vq.config import ModelConfig, OptimConfig, RunConfig

# Small models have an output head of their own; large ones share the embeddings, normalise the
# features and scale them down.
_SMALL = ModelConfig(vocab_size=256, d_model=768, n_layer=24)
_LARGE = ModelConfig(
    vocab_size=256,
    d_model=2048,
    n_layer=24,
    tie_embeddings=True,
    final_norm=True,
    logit_scale=0.005,
)

_ADAMW = OptimConfig()
_ADAFACTOR = OptimConfig(optimizer="adafactor", lr=0.01, grad_clip=None)

PRESETS: dict[str, RunConfig] = {
    "enwik8-190m": RunConfig(
        model=replace(_SMALL, p_dropsin=0.2, p_dropres=0.5, p_droplyr=0.3),
        optim=replace(_ADAMW, weight_decay=2e-4),
    ),
    "pg19-1.3b": RunConfig(
        model=replace(_LARGE, vocab_size=32_000, p_dropsin=0.1, p_dropres=0.1, p_droplyr=0.1),
        optim=_ADAFACTOR,
    ),
    "imagenet64-190m": RunConfig(
        model=replace(_SMALL, p_dropsin=0.1, absolute_positions=True), optim=_ADAMW
    ),
    "imagenet64-1.2b": RunConfig(
        model=replace(_LARGE, p_dropsin=0.1, absolute_positions=True), optim=_ADAFACTOR
    ),
}
