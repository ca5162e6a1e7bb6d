"""`tvq bench profile`: parts add up and have the right operators; times are not tested."""

import json
import os

import pytest
import torch
from helpers import tiny_run
from torch.profiler import ProfilerActivity, profile, record_function

from transformer_vq.bench import defaults
from transformer_vq.bench import profile as bench_profile
from transformer_vq.bench.plots import plot_path
from transformer_vq.cli.main import main
from transformer_vq.errors import UserError


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = tiny_run(tmp_path_factory.mktemp("profile"), model={"n_layer": 1})
    return bench_profile.measure(config, steps=2)


def test_parts_add_up_to_the_step(result):
    total = result["profiled_seconds_per_step"]
    assert sum(result["profile"].values()) == pytest.approx(total, rel=1e-9)
    assert sum(op["seconds"] for op in result["operators"]) == pytest.approx(total, rel=1e-9)
    # Nothing is counted twice: the time outside all operators is that of Python.
    (python,) = [op["seconds"] for op in result["operators"] if op["name"] == "Python"]
    assert 0 < python < total
    assert all(seconds > 0 for seconds in result["profile"].values())
    assert result["seconds_per_step"] > 0


@pytest.mark.parametrize(
    ("operator", "parts"),
    [
        ("aten::bmm", {"matrix products", "codebooks"}),
        ("aten::mm", {"matrix products"}),
        ("aten::_softmax", {"softmax"}),
        ("aten::_softmax_backward_data", {"softmax"}),
        ("aten::argmax", {"codebooks"}),
        ("aten::addcdiv_", {"optimizer"}),
        ("aten::linalg_vector_norm", {"optimizer"}),
        ("aten::embedding", {"other"}),
        ("aten::silu", {"other"}),
        ("tvq: data", {"data"}),
    ],
)
def test_operator_is_in_the_right_parts(result, operator, parts):
    assert {op["part"] for op in result["operators"] if op["name"] == operator} == parts


def test_cache_is_separate_from_codebooks_and_embeddings(result):
    calls = {(op["name"], op["part"]): op["calls"] for op in result["operators"]}
    names = {name for name, part in calls if part == "cache"}
    assert any(name.startswith("aten::index_add") for name in names)
    assert ("aten::index_select", "other") in calls  # of the embedding


def test_gradient_has_the_part_of_its_forward_operation():
    x = torch.randn(9, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("tvq: step"):
        with record_function("tvq: codebooks"):
            y = x.sin()
            x.detach().tan()  # creates no autograd node
        y.exp().sum().backward()
    total, operators = bench_profile.summary(profiler.events())
    parts = {op.name.removeprefix("aten::"): op.part for op in operators}
    assert parts["cos"] == parts["SinBackward0"] == "codebooks"
    assert parts["ExpBackward0"] == parts["exp"] == "other"
    assert sum(op.seconds for op in operators) == pytest.approx(total, rel=1e-9)


def test_command_prints_tables_and_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(
        bench_profile, "in_subprocess", lambda f, *arguments, seconds: f(*arguments)
    )
    monkeypatch.setattr(defaults, "PROFILE_BASE", tiny_run(tmp_path, model={"n_layer": 1}))
    out = tmp_path / "profile.json"
    main(["bench", "profile", "--steps", "1", "--out", str(out), "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(out.read_text())
    assert json.loads(last) == result
    assert "\n".join(table) == bench_profile.table(result)
    assert "| total |" in "\n".join(table)
    assert str(tmp_path) not in out.read_text()
    assert plot_path(out) == [out.with_suffix(".png")]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--time-limit", "nan"], "--time-limit nan"),
        (["smal"], "did you mean small?"),
        (["tiny", "--model.n-code", "0"], "--model.n-code 0"),
        (["tiny", "--data.path", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_user_error_is_one_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr(
        bench_profile, "in_subprocess", lambda f, *arguments, seconds: f(*arguments)
    )
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "profile", *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_failed_profile_is_a_user_error(monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(
        bench_profile, "in_subprocess", lambda *_, **__: {"failed": "out of memory"}
    )
    with pytest.raises(UserError, match="out of memory"):
        bench_profile.run(tiny_run(tmp_path))


def test_profile_above_the_time_limit_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "99")
    with pytest.raises(UserError, match=r"exceeded the time limit of 0.01 s.*--time-limit"):
        bench_profile.run(tiny_run(tmp_path), time_limit=0.01)
