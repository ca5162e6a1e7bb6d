"""`tvq bench decode`: its record, tables and failures; times are not tested."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.bench import decode, gpt2
from transformer_vq.bench.cells import in_subprocess, machine
from transformer_vq.bench.decode import Cell, measure
from transformer_vq.bench.plots import plot_record
from transformer_vq.cli.main import main
from transformer_vq.errors import MissingExtraError
from transformer_vq.memory_use import peak_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(decode, "ROUNDS", 2)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(decode, "ROUNDS", 1)
    monkeypatch.setattr(decode, "MAX_STEPS", 2)


@pytest.mark.parametrize("kind", ["full", "gpt2"])
def test_state_of_the_baselines_grows_with_the_context(kind, tmp_path):
    config = tiny_config()
    rows = [measure(config, Cell(kind, n, 2), CPU, tmp_path) for n in (8, 16)]
    keys = [decode.state_bytes(config, Cell(kind, n, 2)) for n in (8, 16)]
    assert keys[1] == 2 * keys[0]
    for row, want in zip(rows, keys, strict=True):
        assert want <= row["state_bytes"] < want + 500  # and the position of each row
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["ms_per_step"])


def test_state_of_vq_does_not_grow_with_the_context(tmp_path):
    short, long = (measure(tiny_config(), Cell("vq", n, 3), CPU, tmp_path) for n in (8, 5000))
    assert short["state_bytes"] == long["state_bytes"] > 0


def test_a_bf16_state_counts_half_of_keys_values_and_means(tmp_path):
    cells = [Cell("vq", 8, 2, state_precision=x) for x in ("fp32", "bf16")]
    full, half = (measure(tiny_config(), x, CPU, tmp_path)["state_bytes"] for x in cells)
    layers = TransformerVQ(tiny_config()).init_state(2).layers
    tables = [x for layer in layers for x in (layer.k, layer.v, layer.cache.mean)]
    assert full - half == sum(x.nbytes for x in tables) / 2


def test_gpt2_baseline_has_about_as_many_parameters():
    from transformer_vq.presets import PRESETS

    for name in ("small", "enwik8-190m"):
        config = PRESETS[name].model
        width, n_layer = gpt2.shape(config)
        assert 12 * n_layer * width**2 == pytest.approx(gpt2.n_parameters(config), rel=0.15)


def test_command_prints_a_table_and_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "in_subprocess", lambda f, *args, memory_gb, seconds: f(*args))
    out = tmp_path / "decode.json"
    options = ["--preset", "tiny", "--contexts", "8", "20", "--batches", "1", "--kinds", "vq"]
    main(["bench", "decode", *options, "--prefills", "30", "--out", str(out), "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(out.read_text())
    assert json.loads(last) == result
    assert "\n".join(table) == decode.table(result)
    assert [row["context"] for row in result["decode"]] == [8, 20]
    assert result["reading"][0]["peak_bytes"] >= result["reading"][0]["before_bytes"] > 0
    assert result["machine"]["torch"] == torch.__version__
    plot_record(result, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_state_above_the_memory_limit_is_reported_without_measuring():
    result = decode.run(
        tiny_config(), contexts=[10**9], batches=[1], kinds=["full"], prefills=[], memory_gb=1.0
    )
    assert "GB" in result["decode"][0]["failed"]
    assert "a state of" in decode.table(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        (["decod"], "did you mean decode?"),
        (["decode", "--contexts", "0"], "--contexts"),
        (["decode", "--prefills", "0"], "--prefills"),
        (["decode", "--time-limit", "0"], "--time-limit 0"),
        (["decode", "--memory-gb", "-1"], "--memory-gb -1"),
        (["decode", "--preset", "smal"], "did you mean small?"),
    ],
)
def test_user_error_is_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_cell_above_the_time_limit_is_reported():
    result = decode.run(
        tiny_config(), contexts=[8], batches=[1], kinds=["vq"], prefills=[9], time_limit=0.01
    )
    failed = "exceeded the time limit of 0.01 s"
    assert result["decode"][0]["failed"] == result["reading"][0]["failed"] == failed
    assert decode.table(result).count(failed) == 2


def test_gpt2_baseline_without_transformers_is_rejected_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(decode, "in_subprocess", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "decode", "--preset", "tiny"])
    assert stopped.value.code == 2
    assert "pip install 'transformers>=5'" in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        measure(tiny_config(), Cell("gpt2", 8, 1), CPU, Path())


def test_existing_output_file_is_replaced_only_with_overwrite(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "in_subprocess", lambda f, *args, **_: {"failed": "out of memory"})
    out = tmp_path / "decode.json"
    out.write_text("kept")
    command = ["bench", "decode", "--preset", "tiny", "--out", str(out)]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error
    assert error.count("\n") == 1
    assert out.read_text() == "kept"
    main([*command, "--overwrite"])
    assert json.loads(out.read_text())["decode"]


def _work(how: str) -> dict[str, int]:
    if how == "mistake":
        raise ValueError("a mistake")
    if how == "memory":
        torch.zeros(8 * 10**9)
    if how == "dies":
        raise SystemExit(3)
    return {"peak": peak_bytes()}


@pytest.mark.slow
def test_in_subprocess_returns_the_result_or_the_failure():
    held = torch.ones(2 * 10**7)  # 80 MB of this process, which the subprocess does not have
    here = peak_bytes()
    assert here > held.numel() * 4
    assert 0 < in_subprocess(_work, "succeeds")["peak"] < here
    assert in_subprocess(_work, "memory", memory_gb=4) == {"failed": "out of memory"}
    assert in_subprocess(_work, "dies") == {"failed": "exit status 3"}
    with pytest.raises(ValueError, match="a mistake"):
        in_subprocess(_work, "mistake")


def test_machine_names_the_cpu():
    found = machine()
    assert found["cores"] >= 1
    assert found["processor"]


def test_share_is_the_median_of_rounds_of_steps_and_bandwidth(monkeypatch, tmp_path):
    seconds, rates = iter([1.0, 4.0, 2.0]), iter([40.0, 30.0, 20.0])
    monkeypatch.setattr(decode, "ROUNDS", 3)
    monkeypatch.setattr(decode, "best_seconds", lambda *_, **__: next(seconds))
    monkeypatch.setattr(decode, "bandwidth_probe", lambda _: lambda: next(rates))
    prepared = decode.Prepared(lambda: None, state_bytes=15, weight_bytes=5)
    monkeypatch.setattr(decode, "_prepare", lambda *_: prepared)
    cell = decode.Cell("vq", context=8, batch=2)
    found = decode.measure(tiny_config(), cell, torch.device("cpu"), tmp_path)
    assert found["share_of_bandwidth"] == 0.5  # of 0.5, 1/6 and 0.5
    assert found["read_bandwidth"] == 30.0
    assert found["ms_per_step"] == 1e3
    assert found["tokens_per_second"] == 2.0
