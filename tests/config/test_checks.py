"""Configs from JSON or Python: any value is taken over as it is or rejected in one line."""

import json
import math
from copy import deepcopy
from dataclasses import fields, replace

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


def rejection(make, *arguments, **options):
    """The one line with which something is rejected."""
    with pytest.raises(UserError) as raised:
        make(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("part", ["model", "data", "optim", "train", "parallel"])
def test_from_dict_names_an_unknown_option(part):
    values = PRESETS["tiny"].to_dict()
    values[part]["colour"] = 3
    message = rejection(RunConfig.from_dict, values)
    assert "'colour'" in message
    assert f"{part} config" in message


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


def test_from_dict_rejects_deep_nesting_and_huge_numbers():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in (deep, 10**10_000, "x" * 10_000_000, {"a": deep}):
        values = PRESETS["tiny"].to_dict()
        values["train"]["steps"] = wrong
        assert len(rejection(RunConfig.from_dict, values)) < 300
        values["train"] = wrong
        assert len(rejection(RunConfig.from_dict, values)) < 300
        assert len(rejection(RunConfig.from_dict, wrong)) < 300
    while deep:  # freed one by one: the interpreter would recurse
        deep = deep.pop()


def test_a_model_config_round_trips_through_json():
    for preset in PRESETS.values():
        values = json.loads(json.dumps(preset.to_dict()["model"]))
        assert ModelConfig.from_dict(values) == preset.model


def test_from_dict_checks_values():
    values = PRESETS["tiny"].to_dict()
    values["train"]["steps"] = 0
    want = "train.steps=0: must be an integer of at least 1"
    assert rejection(RunConfig.from_dict, values) == want


WRONG = [None, [], {}, "", "x", "3", -1, 0, 1, 2.0, 1e308, -1e308, math.nan, math.inf, -math.inf]
WRONG += [10**30, -(10**30), 10**400, True, False, [[1]], [0.5, 0.5], [0, 0], ["a", None], "a\0b"]
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
