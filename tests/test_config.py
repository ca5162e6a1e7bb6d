"""Configs: there and back through JSON, differences by name, mistakes in one line."""

import json
import math
from dataclasses import replace

import pytest
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_vq import PRESETS
from transformer_vq.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from transformer_vq.errors import UserError


def through_json(config):
    return RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def rejection(make, *arguments, **options):
    """The one line with which something is rejected."""
    with pytest.raises(UserError) as raised:
        make(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips_through_json(name):
    config = PRESETS[name]
    again = through_json(config)
    assert again == config
    assert again.differences(config) == {}
    assert isinstance(again.optim.betas, tuple)


def test_only_the_model_section_is_required():
    model = {"vocab_size": 17, "d_model": 16, "n_layer": 2}
    assert RunConfig.from_dict({"model": model}) == RunConfig(ModelConfig(**model))


def test_differences_name_fields_with_both_values():
    one = PRESETS["tiny"]
    other = replace(
        one,
        model=replace(one.model, d_k=32),
        train=replace(one.train, steps=7, device="cuda"),
        optim=replace(one.optim, betas=(0.0, 0.5)),
    )
    assert one.differences(other) == {
        "model.d_k": (one.model.d_k, 32),
        "optim.betas": (one.optim.betas, (0.0, 0.5)),
        "train.steps": (one.train.steps, 7),
        "train.device": ("auto", "cuda"),
    }


@pytest.mark.parametrize(
    ("kind", "changes", "begin"),
    [
        (TrainConfig, {"steps": 0}, "train.steps=0: must be an integer of at least 1"),
        *((TrainConfig, {"steps": x}, f"train.steps={x!r}: must be an") for x in (1.5, True, "3")),
        (TrainConfig, {"batch_size": 2**24 + 1}, "train.batch_size=16777217: must be an"),
        (TrainConfig, {"seed": 2**63}, "train.seed=9223372036854775808: must be an integer of at"),
        (TrainConfig, {"seq_len": 100, "backprop_len": 32}, "train.seq_len=100 is not a multiple"),
        (TrainConfig, {"batch_size": 12, "accumulate": 5}, "train.batch_size=12 is not a multiple"),
        (TrainConfig, {"precision": "fp16"}, "train.precision='fp16': choose one of fp32, bf16"),
        (DataConfig, {"dataset": ""}, "data.dataset='': choose one of text, "),
        (DataConfig, {"cache": ""}, "data.cache='': must not be empty, or None"),
        (DataConfig, {"tokenizer": 5}, "data.tokenizer=5: must be text, or None"),
        (
            DataConfig,
            {"dataset": "images", "tokenizer": "x"},
            "data.tokenizer='x': data.dataset=images does not use it",
        ),
        (DataConfig, {"path": ["a"]}, "data.path=['a']: must be a list of values"),
        (DataConfig, {"path": ("a", "")}, "data.path=('a', ''): each must not be empty"),
        (ParallelConfig, {"dp": -1}, "parallel.dp=-1: must be an integer of at least 0"),
        (OptimConfig, {"lr": 0.0}, "optim.lr=0.0: must be a number of at least 1e-30"),
        (OptimConfig, {"lr": math.nan}, "optim.lr=nan: must be a finite number"),
        (OptimConfig, {"lr": 1e31}, "optim.lr=1e+31: must be a number of at most 1e+30"),
        (OptimConfig, {"grad_clip": math.inf}, "optim.grad_clip=inf: must be a finite number, or"),
        (OptimConfig, {"weight_decay": 1.0}, "optim.weight_decay=1.0: must be a number below"),
        (OptimConfig, {"betas": (0.9, 1.0)}, "optim.betas=(0.9, 1.0): each must be a number"),
        (OptimConfig, {"betas": (0.9,)}, "optim.betas=(0.9,): must be a list of 2 values"),
        (OptimConfig, {"optimizer": "sgd"}, "optim.optimizer='sgd': choose one of adamw, "),
        (OptimConfig, {"update_clip": 2.0}, "optim.update_clip=2.0: optim.optimizer=adamw does"),
        (OptimConfig, {"optimizer": "adafactor", "eps": 1e-3}, "optim.eps=0.001: optim.optimizer="),
        (OptimConfig, {"decay_share": 0.5}, "optim.decay_share=0.5: optim.schedule=cosine"),
        (tiny_config, {"n_layer": 2**12 + 1}, "model.n_layer=4097: must be an integer of at most"),
        (tiny_config, {"d_model": 15}, "model.d_model=15: must be even"),
        (tiny_config, {"d_k": 5, "head_type": "mha"}, "model.d_model=16 is not a multiple"),
        (tiny_config, {"commit_coef": -1.0}, "model.commit_coef=-1.0: must be a number"),
        (tiny_config, {"n_kv_head": 2}, "model.n_kv_head=2 is incompatible with model.head_type="),
        (tiny_config, {"head_type": "gqa", "n_kv_head": 3}, "model.n_kv_head=3 is incompatible"),
        (tiny_config, {"head_type": "gqa", "n_kv_head": None}, "model.n_kv_head=None is incompat"),
        (tiny_config, {"final_norm": 1}, "model.final_norm=1: must be true or false"),
    ],
)
def test_fields_are_checked(kind, changes, begin):
    assert rejection(kind, **changes).startswith(begin)


@pytest.mark.parametrize(
    ("n_steps", "share", "start"),
    [(1000, 0.2, 800), (10, 0.25, 8), (10, 1.0, 0), (10, 0.0, 9), (1, 0.2, 0), (3, 0.1, 2)],
)
def test_wsd_decays_in_the_last_share_of_the_steps_and_at_least_in_one(n_steps, share, start):
    assert OptimConfig(schedule="wsd", decay_share=share).decay_start(n_steps) == start


def test_the_warmup_of_wsd_ends_before_its_decay():
    def wsd(warmup, steps):
        optim = OptimConfig(schedule="wsd", warmup=warmup)
        return RunConfig(tiny_config(), optim=optim, train=TrainConfig(steps=steps))

    assert wsd(80, 100).optim.warmup == 80
    message = rejection(wsd, 81, 100)
    assert message.startswith("optim.warmup=81: the decay of optim.schedule=wsd starts at step 80")
    assert "--optim.warmup" in message
    RunConfig(tiny_config(), optim=OptimConfig(warmup=81), train=TrainConfig(steps=10))


@pytest.mark.parametrize("part", ["model", "data", "optim", "train", "parallel"])
def test_from_dict_names_options_that_are_unknown_or_not_an_object(part):
    values = PRESETS["tiny"].to_dict()
    for wrong in ([1, 2], 5, None, "x"):
        assert f"{part} config" in rejection(RunConfig.from_dict, values | {part: wrong})
        rejection(RunConfig.from_dict, wrong)
    values[part]["colour"] = 3
    assert rejection(RunConfig.from_dict, values).startswith(f"{part}.colour is not an option")


def test_from_dict_suggests_the_nearest_option_and_names_what_is_missing():
    values = PRESETS["tiny"].to_dict()
    assert "did you mean model?" in rejection(RunConfig.from_dict, values | {"modle": {}})
    assert "did you mean n_code?" in rejection(ModelConfig.from_dict, {"n_codes": 3})
    assert rejection(RunConfig.from_dict, {"data": {}}).startswith("model is missing")
    message = rejection(RunConfig.from_dict, {"model": {"vocab_size": 3}})
    assert message.startswith("model.d_model is missing")


FIELDS = [(part, name) for part, x in PRESETS["tiny"].to_dict().items() for name in x]
VALUES = [None, [], {}, "", "x", "3", -1, 0, 1, 2.0, 1e308, math.nan, math.inf, -math.inf]
VALUES += [10**30, 10**400, True, False, [[1]], [0.5, 0.5], [0, 0], ["a", None]]


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(FIELDS),
    st.sampled_from(VALUES) | st.integers() | st.floats() | st.text() | st.booleans(),
)
def test_from_dict_keeps_a_value_or_rejects_it(preset, field, value):
    part, name = field
    values = PRESETS[preset].to_dict()
    values[part][name] = value
    try:
        found = RunConfig.from_dict(values).to_dict()[part][name]
    except UserError:
        return
    found = list(found) if isinstance(found, tuple) else found
    assert found in (value, [value])  # a single path may be a string
    assert isinstance(found, bool) == isinstance(value, bool)
