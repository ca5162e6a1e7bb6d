"""Sizes of extreme configs, and the advice on options that reduce memory."""

from dataclasses import astuple, fields, replace

import pytest
import torch
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_vq.cli.info import sizes_table
from transformer_vq.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.errors import UserError
from transformer_vq.training.sizes import Sizes, memory_hint, sizes

HEAD_TYPES = ("shga", "mqa", "mha", "gqa")


def run_of(train=None, **model):
    """Return the config of a tiny run."""
    train = {"batch_size": 8, "seq_len": 24, "backprop_len": 8} | (train or {})
    return RunConfig(tiny_config(**model), train=TrainConfig(**train))


@pytest.mark.parametrize(
    ("mesh", "model", "train"),
    [
        ({"dp": 300}, {}, {}),
        ({"fsdp": 3}, {}, {}),
        ({"dp": 2, "fsdp": 2}, {}, {"accumulate": 4}),
        ({"tp": 3}, {}, {}),
        ({"tp": 4}, {"head_type": "mha"}, {}),
        ({"cp": 5}, {}, {}),
        ({"cp": 2}, {"attention": "full"}, {}),
        ({"tp": 2, "fsdp": 2}, {}, {}),
    ],
)
def test_sizes_reject_a_mesh_that_does_not_divide_the_run(mesh, model, train):
    config = replace(run_of(train, **model), parallel=ParallelConfig(**mesh))
    with pytest.raises(UserError):
        sizes(config)


def test_dp_zero_counts_as_one_process():
    one, zero = (replace(run_of(), parallel=ParallelConfig(dp=dp)) for dp in (1, 0))
    assert sizes(one) == sizes(zero)


# Mostly powers of two, so that most configs are valid.
WIDTHS = st.sampled_from([1, 2, 6, 16, 128, 2**20, 2**24])
COUNTS = st.sampled_from([1, 2, 6, 64, 4096, 2**20, 2**24])
PROCESSES = st.sampled_from([1, 1, 1, 1, 2, 3, 4, 2**20])
DRAWN = {
    **dict.fromkeys(("vocab_size", "d_model", "d_k", "n_code", "block_len"), WIDTHS),
    **dict.fromkeys(("steps", "batch_size", "backprop_len"), COUNTS),
    "seq_len": st.sampled_from([4096, 3 * 2**24, 2**40]),
    **dict.fromkeys(("fsdp", "cp", "tp"), PROCESSES),
    "n_layer": st.sampled_from([1, 2, 24, 4096]),
    "dp": st.just(0) | PROCESSES,
    "accumulate": st.sampled_from([0, 1, 2, 3]),
    "head_type": st.sampled_from(HEAD_TYPES),
    "n_kv_head": st.sampled_from([None, 1, 2, 3]),
    "attention": st.sampled_from(["vq", "full"]),
    "reduction": st.sampled_from(["auto", "serial", "input_scan"]),
    "precision": st.sampled_from(["fp32", "bf16"]),
    "optimizer": st.sampled_from(["adamw", "adafactor"]),
    "device": st.sampled_from(["auto", "cpu", "cuda:99", "nonsense"]),
    **dict.fromkeys(
        ("compressive_cache", "tie_embeddings", "checkpoint_activations"), st.booleans()
    ),
    "absolute_positions": st.booleans(),
}


@st.composite
def drawn_configs(draw, kind):
    """Draw a config, or None if the drawn values cannot be combined."""
    values = {f.name: draw(DRAWN[f.name]) for f in fields(kind) if f.name in DRAWN}
    try:
        return kind(**values)
    except UserError:
        return None


@settings(max_examples=400)
@given(*map(drawn_configs, (ModelConfig, OptimConfig, TrainConfig, ParallelConfig)))
def test_sizes_accept_a_config_or_reject_it_in_one_line(model, optim, train, mesh):
    if model is None or train is None:
        return
    config = RunConfig(model, optim=optim, train=train, parallel=mesh)
    assert memory_hint(config)
    try:
        found = sizes(config)
    except UserError as error:
        lines = str(error).splitlines()
    else:
        assert min(astuple(replace(found, codebooks=1, average_bytes=1))) > 0
        assert sizes_table("any", config, found)
        lines = ["accepted"]
    assert len(lines) == 1


def test_sizes_accept_the_largest_model():
    most, long = 2**24, 2**40
    for head_type in HEAD_TYPES:
        for d_k in (1, most):
            n_kv_head = 1 if head_type == "gqa" else None
            heads = {"d_k": d_k, "n_kv_head": n_kv_head}
            model = ModelConfig(
                most, most, 4096, head_type=head_type, **heads, n_code=most, block_len=most
            )
            train = TrainConfig(long, most, long, long)
            config = RunConfig(model, train=train)
            assert isinstance(sizes(config), Sizes)
            assert "parameters" in sizes_table("largest", config, sizes(config))


def test_memory_hint_names_only_options_that_help(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    plain = {"device": "cpu", "batch_size": 8, "backprop_len": 24}
    hint = memory_hint(run_of(plain))
    every = (
        *("--train.batch-size", "--train.accumulate", "--train.checkpoint-activations"),
        *("--train.precision bf16", "--train.backprop-len", "--model.d-model"),
    )
    for name in every:
        assert name in hint
    assert "--train.seq-len" not in hint
    for change, absent in (
        ({"batch_size": 1}, "--train.batch-size"),
        ({"batch_size": 1}, "--train.accumulate"),
        ({"accumulate": 8}, "--train.accumulate"),
        ({"accumulate": 0}, "--train.accumulate"),
        ({"checkpoint_activations": True}, "--train.checkpoint-activations"),
        ({"precision": "bf16"}, "--train.precision"),
        ({"backprop_len": 3}, "--train.backprop-len"),
    ):
        assert absent not in memory_hint(run_of(plain | change))
    assert "--train.seq-len" in memory_hint(run_of(plain, attention="full"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert "--train.precision" not in memory_hint(run_of(plain))
    assert "--train.precision" not in memory_hint(run_of(plain | {"device": "nonsense"}))


def test_memory_hint_counts_sequences_per_device():
    config = replace(run_of({"batch_size": 8}), parallel=ParallelConfig(dp=8))
    assert "--train.accumulate" not in memory_hint(config)
