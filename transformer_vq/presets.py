"""Presets: the hyperparameters of the paper (Table 10), and sizes for training on a CPU."""

from __future__ import annotations

from dataclasses import replace

from transformer_vq.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

# Small models have a separate output head. Large models tie it to the embeddings, and normalize and
# scale the features before it.
_SMALL = ModelConfig(vocab_size=256, d_model=768, n_layer=24, commit_coef=1e-4)
_SMALL = replace(_SMALL, codebook_init="random", revive_below=0.0)
_LARGE = replace(_SMALL, d_model=2048, tie_embeddings=True, final_norm=True, logit_scale=0.005)

_ADAFACTOR = OptimConfig(optimizer="adafactor", lr=0.01, grad_clip=None)
_IMAGENET64 = DataConfig(dataset="imagenet64")

_PAPER = TrainConfig(precision="bf16", accumulate=0, log_every=10, eval_every=1000, save_every=1000)
_IMAGES = replace(_PAPER, seq_len=12_288)

# Chosen by measurement on two cores. Short runs need a short warm-up and a higher learning rate.
# The vocabulary is bytes and the end-of-document token. With the default commit_coef, 1e-2, `tiny`
# has 2.355 test bits per byte instead of 2.334 (one seed).
_CPU_MODEL = ModelConfig(vocab_size=257, d_model=256, n_layer=4, commit_coef=1e-4)
_CPU_MODEL = replace(_CPU_MODEL, d_k=64, n_code=256, block_len=128)
_CPU_OPTIM = OptimConfig(lr=3e-3, warmup=100, grad_clip=1.0, lr_final_share=0.05)
_CPU_TRAIN = TrainConfig(batch_size=8, seq_len=2048, backprop_len=512, steps=1500)

# The model in the package: books with a learned vocabulary, context of 8,192 tokens.
_TIED = replace(_CPU_MODEL, tie_embeddings=True, final_norm=True, logit_scale=1 / 16)
_MUON = replace(_CPU_OPTIM, optimizer="muon", lr=0.01, weight_decay=1e-4)
_BOOKS = RunConfig(
    model=replace(_TIED, vocab_size=4096, head_type="mha", ema_decay=0.98, commit_coef=1e-3),
    data=DataConfig(tokenizer="bpe"),
    optim=replace(_MUON, schedule="wsd", decay_share=0.3, lr_final_share=0.02),
    train=replace(
        _CPU_TRAIN, seq_len=8192, steps=2200, eval_every=500, save_every=250, eval_tokens=100_000
    ),
)

PRESETS: dict[str, RunConfig] = {
    "tiny": RunConfig(
        model=replace(_CPU_MODEL, d_model=128, n_layer=2, n_code=128),
        optim=_CPU_OPTIM,
        train=replace(_CPU_TRAIN, steps=400, eval_every=100, save_every=100, eval_tokens=65_536),
    ),
    "small": RunConfig(
        model=_CPU_MODEL,
        optim=_CPU_OPTIM,
        train=replace(_CPU_TRAIN, eval_every=250, save_every=250, eval_tokens=200_000),
    ),
    "books": _BOOKS,
    "enwik8-190m": RunConfig(
        model=replace(_SMALL, p_dropsin=0.2, p_dropres=0.5, p_droplyr=0.3),
        data=DataConfig(dataset="enwik8", end_of_document=False),
        optim=OptimConfig(weight_decay=2e-4),
        train=replace(_PAPER, steps=125_000),
    ),
    "pg19-1.3b": RunConfig(
        model=replace(_LARGE, vocab_size=32_000, p_dropsin=0.1, p_dropres=0.1, p_droplyr=0.1),
        data=DataConfig(dataset="pg19", end_of_document=False),
        optim=_ADAFACTOR,
        train=replace(_PAPER, steps=500_000),
    ),
    "imagenet64-190m": RunConfig(
        model=replace(_SMALL, p_dropsin=0.1, absolute_positions=True),
        data=_IMAGENET64,
        train=replace(_IMAGES, batch_size=16, backprop_len=12_288, steps=125_000),
    ),
    "imagenet64-1.2b": RunConfig(
        model=replace(_LARGE, p_dropsin=0.1, absolute_positions=True),
        data=_IMAGENET64,
        optim=_ADAFACTOR,
        train=replace(_IMAGES, backprop_len=2048, steps=500_000),
    ),
}
