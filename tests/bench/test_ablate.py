"""`tvq bench ablate`: its runs, resuming it, and its record."""

import json
import os
import signal
from dataclasses import replace
from statistics import mean, stdev

import pytest
from helpers import tiny_run

from transformer_vq.bench import ablate, defaults
from transformer_vq.bench.ablate import Setting
from transformer_vq.bench.plots import plot_path
from transformer_vq.cli.main import main
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.step import Trainer

NAMES = ["codes-5", "codes-7", "codes-7-no-cache"]


@pytest.fixture
def base(tmp_path, monkeypatch):
    config = tiny_run(
        tmp_path, model={"n_layer": 1}, train={"steps": 6, "eval_every": 3, "save_every": 6}
    )
    monkeypatch.setattr(defaults, "ABLATION_BASE", config)
    monkeypatch.setattr(ablate, "ROUNDS", 1)
    return config


def command(out, *more):
    main(["bench", "ablate", "--codes", "5", "--seeds", "2", "--out", str(out), *more])


def test_settings_include_the_base_with_and_without_its_cache(base):
    want = [Setting(5), Setting(7), Setting(9), Setting(7, compressive_cache=False)]
    assert ablate.settings(base, [9, 5]) == want
    assert ablate.settings(base, [9, 7, 5, 5]) == want


def test_command_trains_prints_tables_and_writes_a_record(base, tmp_path, capsys):
    out = tmp_path / "ablation"
    command(out, "--json")
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads((out / "ablation.json").read_text())
    assert json.loads(last) == result
    assert "\n".join(table) == ablate.table(result)
    assert str(tmp_path) not in last
    rows = result["ablation"]
    for name, row in zip(NAMES, rows, strict=True):
        runs = [out / f"{name}-seed-{seed}" for seed in (0, 1)]
        for seed, run in enumerate(runs):
            model = replace(
                base.model, n_code=row["n_code"], compressive_cache=row["compressive_cache"]
            )
            assert read_config(run).model == model
            assert read_config(run).train.seed == seed
        bits = [
            min(r["bits_per_byte"] for r in read_metrics(run) if r["kind"] == "validation")
            for run in runs
        ]
        assert row["bits_per_byte"] == bits
        assert (row["mean_bits_per_byte"], row["spread"]) == (mean(bits), stdev(bits))
        assert row["latency"] == row["seconds_per_update"] / rows[1]["seconds_per_update"] > 0
    assert f"| 5 | {rows[0]['mean_bits_per_byte']:.4f} | {rows[0]['spread']:.4f} |" in table[2]
    assert table[7].startswith(f"| yes | {rows[1]['mean_bits_per_byte']:.4f} |")
    assert table[8].startswith(f"| no | {rows[2]['mean_bits_per_byte']:.4f} |")
    assert plot_path(out / "ablation.json") == [out / "ablation.png"]
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_interrupted_ablation_resumes_with_the_same_result(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ablate, "latencies", lambda configs: [1.0] * len(configs))
    command(tmp_path / "uninterrupted")
    want = (tmp_path / "uninterrupted" / "ablation.json").read_text()
    out, done, train_step = tmp_path / "interrupted", [], Trainer.step

    def counted(self, batch, step, begins, ends):
        done.append(step)
        if len(done) == 10:  # during the second run
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, batch, step, begins, ends)

    monkeypatch.setattr(Trainer, "step", counted)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command(out)
    assert stopped.value.code == 130
    assert "run the same command again" in capsys.readouterr().out
    assert not (out / "ablation.json").exists()
    assert not (out / "codes-7-no-cache-seed-0").exists()
    command(out)
    assert done == [*range(6)] * 6  # every step of every run once
    assert (out / "ablation.json").read_text() == want


def test_command_rejects_a_folder_with_another_config(base, tmp_path, capsys):
    command(tmp_path / "out", "--seeds", "1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command(tmp_path / "out", "--model.d-k", "4")
    assert stopped.value.code == 2
    assert "--model.d-k (8 -> 4)" in capsys.readouterr().err


@pytest.mark.slow
def test_one_seed_has_no_spread_and_keeps_the_chosen_accumulation(base, tmp_path, capsys):
    for _ in range(2):  # the second time uses the accumulation chosen by the first
        command(tmp_path / "out", "--seeds", "1", "--train.accumulate", "0", "--json")
    *table, last = capsys.readouterr().out.splitlines()
    assert {row["spread"] for row in json.loads(last)["ablation"]} == {None}
    assert table[-1].split(" | ")[2] == ""
    assert read_config(tmp_path / "out" / "codes-5-seed-0").train.accumulate == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds 0"),
        (["--codes", "0"], "--model.n-code 0"),
        (["--model.attention", "full"], "neither codebooks nor cache"),
    ],
)
def test_user_error_is_one_line_and_trains_nothing(base, tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(tmp_path / "out", *options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_default_sequences_are_much_longer_than_the_window():
    train, model = defaults.ABLATION_BASE.train, defaults.ABLATION_BASE.model
    assert train.seq_len >= 4 * 2 * model.block_len
    assert model.n_code in defaults.CODES
