"""Configs: there and back through JSON, differences by name, mistakes in one line."""

import json
import math
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, replace
from typing import get_args

import pytest
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_vq import PRESETS
from transformer_vq.config import (
    DataConfig,
    Dataset,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from transformer_vq.errors import UserError

INTEGERS = ("steps", "batch_size", "backprop_len", "log_every", "keep")


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


def test_unusual_values_round_trip_through_json():
    config = RunConfig(
        tiny_config(head_type="mqa", attention="full", revive_below=0.5),
        DataConfig("pg19", path="/books", tokenizer="/x.model", cache="/c"),
        OptimConfig(grad_clip=None, betas=(0.5, 0.75)),
        TrainConfig(init_from="run", wandb="project", tensorboard=True, seed=2**63 - 1),
    )
    assert through_json(config) == config


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
    assert other.differences(one)["train.steps"] == (7, one.train.steps)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, 4.0, True, "3", None])
def test_counts_of_a_run_are_positive_integers(name, value):
    message = rejection(TrainConfig, **{name: value})
    option = f"train.{name}"
    assert message == f"{option}={value!r}: must be an integer of at least 1"


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        (tiny_config, {"n_layer": 2**12, "vocab_size": 2**24, "d_model": 2**24, "d_k": 2**24}),
        (tiny_config, {"n_code": 2**24, "block_len": 2**24, "pe_wavelength": 1e30}),
        (OptimConfig, {"warmup": 2**40, "lr": 1e30, "grad_clip": 1e30}),
        (TrainConfig, {"steps": 2**40, "batch_size": 2**24, "seq_len": 2**40, "keep": 2**40}),
        (TrainConfig, {"log_every": 2**40, "eval_every": 2**40, "eval_tokens": 2**40}),
        (TrainConfig, {"save_every": 2**40, "seed": 2**63 - 1}),
        (ParallelConfig, {"dp": 2**20, "fsdp": 2**20, "cp": 2**20, "tp": 2**20}),
    ],
)
def test_numbers_have_an_upper_limit(kind, limits):
    for name, limit in limits.items():
        assert getattr(kind(**{name: limit}), name) == limit
        above = limit + 1 if isinstance(limit, int) else math.nextafter(limit, math.inf)
        assert "of at most" in rejection(kind, **{name: above})


def test_backprop_len_must_divide_seq_len():
    TrainConfig(seq_len=96, backprop_len=32)
    message = rejection(TrainConfig, seq_len=100, backprop_len=32)
    assert message.startswith("train.seq_len=100 is not a multiple of train.backprop_len=32;")


@pytest.mark.parametrize("parts", [5, 24])
def test_accumulate_must_divide_the_batch_size(parts):
    TrainConfig(batch_size=12, accumulate=4)
    message = rejection(TrainConfig, batch_size=12, accumulate=parts)
    assert message.startswith(f"train.batch_size=12 is not a multiple of train.accumulate={parts};")


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (TrainConfig, "train.precision", "fp16"),
        (DataConfig, "data.dataset", "cifar"),
        (DataConfig, "data.dataset", ""),
        (OptimConfig, "optim.optimizer", "sgd"),
    ],
)
def test_literals_must_be_among_the_choices(kind, option, value):
    name = option.split(".")[1]
    message = rejection(kind, **{name: value})
    assert message.startswith(f"{option}={value!r}: choose one of ")
    assert getattr(kind(), name) in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("eps", 0.0),
        ("update_clip", -1.0),
        ("grad_clip", 0.0),
        ("warmup", -1),
        ("weight_decay", 1.0),
        ("weight_decay", -0.1),
        ("lr_final_share", 1.1),
        *((name, math.nan) for name in ("lr", "eps", "update_clip", "grad_clip", "weight_decay")),
        *((name, math.inf) for name in ("lr", "eps", "update_clip", "grad_clip", "lr_final_share")),
        *(
            ("betas", pair)
            for pair in [(0.9, 1.0), (-0.1, 0.5), (0.9, math.nan), (0.9,), [0.9, 0.9]]
        ),
    ],
)
def test_numbers_of_the_optimizer_are_checked(name, value):
    message = rejection(OptimConfig, **{name: value})
    assert message.startswith(f"optim.{name}={value!r}: ")


def test_options_of_the_other_optimizer_are_rejected():
    OptimConfig("adamw", betas=(0.5, 0.5), eps=1e-3)
    OptimConfig("adafactor", update_clip=2.0)
    assert "optim.update_clip" in rejection(OptimConfig, "adamw", update_clip=2.0)
    assert "optim.betas" in rejection(OptimConfig, "adafactor", betas=(0.5, 0.5))
    assert "optim.eps" in rejection(OptimConfig, "adafactor", eps=1e-3)


def test_a_decay_share_is_rejected_where_it_would_be_ignored():
    OptimConfig(schedule="wsd", decay_share=0.5)
    OptimConfig(schedule="cosine", decay_share=0.2)
    message = rejection(OptimConfig, schedule="cosine", decay_share=0.5)
    assert message.startswith("optim.decay_share=0.5: optim.schedule=cosine does not use it")


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


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"vocab_size": 0}, "model.vocab_size=0: must be an integer of at least 1"),
        ({"n_layer": 1.0}, "model.n_layer=1.0: must be an integer of at least 1"),
        ({"n_code": True}, "model.n_code=True: must be an integer of at least 1"),
        ({"p_dropres": 1.0}, "model.p_dropres=1.0: must be a number of at least 0 and below 1"),
        ({"ema_decay": -0.1}, "model.ema_decay=-0.1: must be a number of at least 0 and below"),
        ({"d_model": 15}, "model.d_model=15: must be even"),
        ({"d_k": 5, "head_type": "mha"}, "model.d_model=16 is not a multiple of model.d_k=5"),
        ({"pe_wavelength": 1.0}, "model.pe_wavelength=1.0: must be a number above 1"),
        ({"pe_wavelength": math.nan}, "model.pe_wavelength=nan: must be a finite number"),
        ({"commit_coef": -1.0}, "model.commit_coef=-1.0: must be a number of at least 0"),
        ({"commit_coef": math.inf}, "model.commit_coef=inf: must be a finite number"),
        ({"revive_below": -1.0}, "model.revive_below=-1.0: must be a number of at least 0"),
        ({"n_kv_head": 2}, "model.n_kv_head=2 is for model.head_type=gqa"),
        ({"head_type": "gqa", "n_kv_head": 3}, "model.n_kv_head=3 is incompatible with"),
        ({"head_type": "gqa", "n_kv_head": None}, "model.head_type=gqa needs model.n_kv_head"),
        ({"logit_scale": 0.0}, "model.logit_scale=0.0: must not be 0"),
        ({"logit_scale": math.nan}, "model.logit_scale=nan: must be a finite number"),
        ({"final_norm": 1}, "model.final_norm=1: must be true or false"),
    ],
)
def test_model_fields_are_checked(changes, begin):
    assert rejection(tiny_config, **changes).startswith(begin)


def test_numbers_may_be_negative_or_integers_where_allowed():
    assert tiny_config(logit_scale=-2.5).logit_scale == -2.5
    assert OptimConfig(lr=1, grad_clip=None) == OptimConfig(lr=1.0, grad_clip=None)


@pytest.mark.parametrize("name", ["path", "cache", "tokenizer"])
@pytest.mark.parametrize("path", ["", 5, ["a"]])
def test_paths_that_cannot_exist_are_rejected(name, path):
    assert rejection(DataConfig, "pg19", **{name: path}).startswith(f"data.{name}=")
    assert rejection(TrainConfig, init_from=path).startswith("train.init_from=")


@pytest.mark.parametrize("dataset", get_args(Dataset))
def test_a_tokenizer_is_rejected_where_it_would_be_ignored(dataset):
    if dataset not in ("imagenet64", "images"):
        assert DataConfig(dataset, tokenizer="my.model").tokenizer_name == "my.model"
        return
    message = rejection(DataConfig, dataset, tokenizer="my.model")
    assert message.startswith("data.tokenizer='my.model': ")
    assert "--data.dataset text" in message


def test_configs_cannot_be_changed():
    for part in (PRESETS["tiny"], *(getattr(PRESETS["tiny"], f.name) for f in fields(RunConfig))):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, 1)


@pytest.mark.parametrize("part", ["model", "data", "optim", "train", "parallel"])
def test_from_dict_names_an_unknown_option(part):
    values = PRESETS["tiny"].to_dict()
    values[part]["colour"] = 3
    assert rejection(RunConfig.from_dict, values).startswith(f"{part}.colour is not an option")


def test_from_dict_suggests_the_nearest_option():
    values = PRESETS["tiny"].to_dict()
    assert "did you mean model?" in rejection(RunConfig.from_dict, values | {"modle": {}})
    assert "did you mean n_code?" in rejection(ModelConfig.from_dict, {"n_codes": 3})


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({}, "model is missing"),
        ({"data": {}}, "model is missing"),
        ({"model": {"vocab_size": 3}}, "model.d_model "),
    ],
)
def test_from_dict_names_what_is_missing(values, missing):
    assert rejection(RunConfig.from_dict, values).startswith(missing)


@pytest.mark.parametrize("values", [[1, 2], 5, None, "x", True, math.nan, [[[]]]])
def test_from_dict_rejects_what_is_not_an_object(values):
    rejection(RunConfig.from_dict, values)
    rejection(ModelConfig.from_dict, values)
    for part in PRESETS["tiny"].to_dict():
        changed = PRESETS["tiny"].to_dict() | {part: values}
        assert f"{part} config" in rejection(RunConfig.from_dict, changed)


WRONG = [None, [], {}, "", "x", "3", -1, 0, 1, 2.0, 1e308, -1e308, math.nan, math.inf, -math.inf]
WRONG += [10**30, -(10**30), True, False, [[1]], [0.5, 0.5], [0, 0], ["a", None]]
json_values = st.recursive(
    st.sampled_from(WRONG) | st.integers() | st.floats() | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
places = st.sampled_from(
    [()]
    + [(part,) for part in PRESETS["tiny"].to_dict()]
    + [(part, name) for part, values in PRESETS["tiny"].to_dict().items() for name in values]
)


def built(make, *arguments, **options):
    """What is made, or None if it is rejected in one line."""
    try:
        return make(*arguments, **options)
    except UserError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


def plain(values):
    """Tuples as lists, as JSON has them."""
    if isinstance(values, dict):
        return {name: plain(value) for name, value in values.items()}
    return list(values) if isinstance(values, tuple) else values


@settings(max_examples=400)
@given(st.sampled_from(sorted(PRESETS)), st.lists(st.tuples(places, json_values), max_size=3))
def test_from_dict_keeps_every_value_or_rejects_it_in_one_line(preset, changes):
    values = plain(PRESETS[preset].to_dict())
    for place, value in changes:
        if place == ():
            values = deepcopy(value)
        elif isinstance(values, dict) and len(place) == 1:
            values[place[0]] = deepcopy(value)
        elif isinstance(values, dict) and isinstance(values.get(place[0]), dict):
            values[place[0]][place[1]] = deepcopy(value)
    config = built(RunConfig.from_dict, values)
    if config is None:
        return
    found = plain(config.to_dict())
    for part, options in values.items():
        for name, value in options.items():
            assert found[part][name] in (value, [value])  # a single path may be a string
            assert isinstance(found[part][name], bool) == isinstance(value, bool)


@pytest.mark.parametrize("part", PRESETS["tiny"].to_dict())
def test_configs_keep_values_or_reject_them_in_one_line(part):
    config = getattr(PRESETS["tiny"], part)
    for field in fields(config):
        for value in WRONG:
            changed = built(replace, config, **{field.name: value})
            if changed is not None:
                # A single path may be a string.
                assert getattr(changed, field.name) in (value, (value,))
                hash(changed)


@pytest.mark.parametrize(
    "kind", [ModelConfig, OptimConfig, DataConfig, TrainConfig, ParallelConfig]
)
def test_every_field_has_a_type_that_is_checked(kind):
    needed = {"vocab_size": 16, "d_model": 16, "n_layer": 1} if kind is ModelConfig else {}
    part = {kind: name for name, kind in RunConfig.__annotations__.items()}[kind.__name__]
    for field in fields(kind):
        for value in (b"bytes", 1j, [0.5, 0.5], math.nan, object()):
            message = rejection(kind, **(needed | {field.name: value}))
            assert message.startswith(f"{part}.{field.name}=")


def test_a_run_is_made_of_configs():
    rejection(RunConfig, None)
    rejection(RunConfig, tiny_config(), train=DataConfig())
