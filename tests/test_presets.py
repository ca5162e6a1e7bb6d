"""The presets against Table 10 and Section C.2 of the paper."""

from functools import cache

import pytest
import torch

from transformer_vq import PRESETS, TransformerVQ
from transformer_vq.training.optim import learning_rate, make_optimizer

TABLE_10 = """
                     enwik8-190m  pg19-1.3b  imagenet64-190m  imagenet64-1.2b
global batch size    128          128        16               128
sequence length      8192         8192       12288            12288
backprop length      2048         2048       12288            2048
block length         512          512        512              512
model dimension      768          2048       768              2048
key dimension        128          128        128              128
value dimension      1536         4096       1536             4096
num code             512          512        512              512
num gau              48           48         48               48
sinusoid dropout     0.2          0.1        0.1              0.1
residual dropout     0.5          0.1        0.0              0.0
layerdrop            0.3          0.1        0.0              0.0
weight decay         0.0002       0.0        0.0              0.0
optimizer            adamw        adafactor  adamw            adafactor
total steps          125000       500000     125000           500000
"""


def columns(table: str) -> dict[str, dict[str, str]]:
    names, *rows = [line for line in table.splitlines() if line]
    wanted: dict[str, dict[str, str]] = {name: {} for name in names.split()}
    for row in rows:
        for name, value in zip(wanted, row[21:].split(), strict=True):
            wanted[name][row[:21].strip()] = value
    return wanted


PAPER = columns(TABLE_10)
every_preset = pytest.mark.parametrize("name", PAPER)


@cache
def model_of(name):
    with torch.device("meta"):
        return TransformerVQ(PRESETS[name].model)


@every_preset
def test_table_10(name):
    config, attention = PRESETS[name], model_of(name).branches
    model, train, optim = config.model, config.train, config.optim
    assert (model.head_type, model.attention) == ("shga", "vq")
    found = {
        "global batch size": train.batch_size,
        "sequence length": train.seq_len,
        "backprop length": train.backprop_len,
        "block length": model.block_len,
        "model dimension": model.d_model,
        "key dimension": model.d_k,
        "value dimension": attention[0].d_v,
        "num code": model.n_code,
        "num gau": len(attention),
        "sinusoid dropout": model.p_dropsin,
        "residual dropout": model.p_dropres,
        "layerdrop": model.p_droplyr,
        "weight decay": optim.weight_decay,
        "optimizer": optim.optimizer,
        "total steps": train.steps,
    }
    assert {key: str(value) for key, value in found.items()} == PAPER[name]


@every_preset
def test_optimizer_matches_section_c_2(name):
    config = PRESETS[name]
    optimizer = make_optimizer(dict(model_of(name).named_parameters()), config.optim)
    if config.optim.optimizer == "adamw":
        assert config.optim.grad_clip == 0.1
        wanted = {"lr": 4e-4, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": 0.0}
    else:
        assert config.optim.grad_clip is None  # updates are clipped, gradients are not
        assert optimizer.min_factored == 128
        wanted = {"lr": 0.01, "update_clip": 1.0}
    assert wanted.items() <= optimizer.defaults.items()
    for group in optimizer.param_groups:
        for p in group["params"]:
            wanted_decay = config.optim.weight_decay if p.ndim > 1 else 0.0
            assert group["decay_per_step"] == wanted_decay


@every_preset
def test_learning_rate_rises_for_10_000_steps_and_falls_to_a_tenth(name):
    optim, steps = PRESETS[name].optim, PRESETS[name].train.steps
    rates = [learning_rate(optim, step, steps) for step in (0, 5000, 10_000, steps)]
    peak = optim.lr
    assert rates == pytest.approx([0.0, peak / 2, peak, peak / 10], rel=1e-12)
    middle = learning_rate(optim, (10_000 + steps) // 2, steps)
    assert middle == pytest.approx(0.55 * peak, rel=1e-12)


@every_preset
def test_codebooks_head_and_positions_match_the_paper(name):
    model, train = PRESETS[name].model, PRESETS[name].train
    assert (model.commit_coef, model.ema_decay, model.pe_wavelength) == (1e-4, 0.99, 1e5)
    assert (model.codebook_init, model.revive_below) == ("random", 0.0)
    assert (model.compressive_cache, model.grad_through_cache) == (True, True)
    large = model.d_model == 2048
    assert (model.tie_embeddings, model.final_norm, model.logit_scale < 1) == (large,) * 3
    dataset = PRESETS[name].data.dataset
    assert dataset == name.split("-")[0]
    assert model.absolute_positions == (dataset == "imagenet64")
    assert model.vocab_size == (32_000 if dataset == "pg19" else 256)
    assert train.precision == "bf16"
