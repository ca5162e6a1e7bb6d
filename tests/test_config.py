"""Configs: there and back through JSON, differences by name, mistakes in one line."""

import json
from dataclasses import FrozenInstanceError, fields, replace
from typing import get_args

import pytest
from helpers import tiny_config

from transformer_vq import PRESETS
from transformer_vq.config import (
    DataConfig,
    Dataset,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)

WHOLE_NUMBERS = (
    *("steps", "batch_size", "seq_len", "backprop_len"),
    *("log_every", "eval_every", "eval_tokens", "save_every", "keep"),
)


def through_json(config):
    return RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def refusal(make, *arguments, **options):
    """The one line with which something is refused."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared by the caller
        make(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json(name):
    config = PRESETS[name]
    again = through_json(config)
    assert again == config
    assert again.differences(config) == {}
    assert isinstance(again.optim.betas, tuple)


def test_values_that_no_preset_has_survive_json():
    config = RunConfig(
        tiny_config(head_type="mqa", attention="full", revive_below=0.5),
        DataConfig("pg19", path="/books", tokenizer="/x.model", cache="/c"),
        OptimConfig(grad_clip=None, betas=(0.5, 0.75)),
        TrainConfig(init_from="run", wandb="project", tensorboard=True, seed=2**63 - 1),
    )
    assert through_json(config) == config


def test_only_the_model_must_be_there():
    model = {"vocab_size": 17, "d_model": 16, "n_layer": 2}
    assert RunConfig.from_dict({"model": model}) == RunConfig(ModelConfig(**model))


def test_what_is_given_to_from_dict_stays_as_it_is():
    values = json.loads(json.dumps(PRESETS["tiny"].to_dict()))
    before = json.dumps(values)
    RunConfig.from_dict(values)
    assert json.dumps(values) == before


@pytest.mark.parametrize("part", ["model", "data", "optim", "train"])
def test_an_unknown_field_is_named(part):
    values = PRESETS["tiny"].to_dict()
    values[part]["colour"] = 3
    message = refusal(RunConfig.from_dict, values)
    assert message.startswith("this is not the config of a run: ")
    assert "'colour'" in message


@pytest.mark.parametrize("values", [{}, {"data": {}}, {"model": {"vocab_size": 3}}])
def test_what_is_missing_is_named(values):
    message = refusal(RunConfig.from_dict, values)
    assert message.startswith("this is not the config of a run: ")
    assert "'d_model'" in message if "model" in values else "'model'" in message


def test_wrong_values_are_refused_on_the_way_back():
    values = PRESETS["tiny"].to_dict()
    values["train"]["steps"] = 0
    assert refusal(RunConfig.from_dict, values).startswith("steps=0: must be a whole number")


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


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", None])
def test_numbers_of_a_run_are_whole_and_at_least_one(name, value):
    message = refusal(TrainConfig, **{name: value})
    assert message == f"{name}={value!r}: must be a whole number of at least 1"


def test_windows_must_fill_a_sequence():
    TrainConfig(seq_len=96, backprop_len=32)
    assert refusal(TrainConfig, seq_len=100, backprop_len=32) == (
        "seq_len=100 is not a multiple of backprop_len=32: a sequence is worked on in whole windows"
    )


@pytest.mark.parametrize("parts", [5, 24])
def test_parts_of_a_batch_must_be_equal(parts):
    TrainConfig(batch_size=12, accumulate=4)
    assert refusal(TrainConfig, batch_size=12, accumulate=parts) == (
        f"batch_size=12 cannot be divided into accumulate={parts} equal parts"
    )


@pytest.mark.parametrize("parts", [-1, 0.5, "3", None])
def test_the_number_of_parts_is_a_whole_number(parts):
    said = refusal(TrainConfig, batch_size=12, accumulate=parts)
    assert said == f"accumulate={parts!r}: must be a whole number, or 0"


def test_the_number_of_parts_may_be_left_open():
    assert TrainConfig(batch_size=12, accumulate=0).accumulate == 0


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_have_63_bits(seed):
    TrainConfig(seed=0)
    TrainConfig(seed=2**63 - 1)
    assert refusal(TrainConfig, seed=seed) == (f"seed={seed}: must not be negative, and below 2^63")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TrainConfig, "precision", "fp16"),
        (DataConfig, "dataset", "cifar"),
        (DataConfig, "dataset", ""),
        (OptimConfig, "optimizer", "sgd"),
    ],
)
def test_words_must_be_among_the_choices(kind, name, value):
    message = refusal(kind, **{name: value})
    assert message.startswith(f"{name}={value!r}: choose one of (")
    assert repr(getattr(kind(), name)) in message


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
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.5)),
    ],
)
def test_numbers_of_the_optimizer_are_checked(name, value):
    assert refusal(OptimConfig, **{name: value}).startswith(f"{name}={value!r}: must ")


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be a whole number of at least 1"),
        ({"n_layer": 1.0}, "n_layer=1.0: must be a whole number of at least 1"),
        ({"p_dropres": 1.0}, "p_dropres=1.0: must be at least 0 and below 1"),
        ({"ema_decay": -0.1}, "ema_decay=-0.1: must be at least 0 and below 1"),
        ({"d_model": 15}, "d_model=15: must be even"),
        ({"d_k": 5, "head_type": "mha"}, "d_model=16 is not a multiple of d_k=5"),
        ({"pe_wavelength": 1.0}, "pe_wavelength=1.0: must be above 1"),
        ({"commit_coef": -1.0}, "commit_coef and revive_below must not be negative"),
        ({"reduction": "sum"}, "reduction='sum': choose one of"),
    ],
)
def test_what_a_model_is_made_of_is_checked(changes, begin):
    assert refusal(tiny_config, **changes).startswith(begin)


def test_datasets_are_text_or_pictures():
    found = [name for name in get_args(Dataset) if DataConfig(name).has_pictures]
    assert found == ["imagenet64", "pictures"]


def test_configs_cannot_be_changed():
    for part in (PRESETS["tiny"], *(getattr(PRESETS["tiny"], f.name) for f in fields(RunConfig))):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, 1)
