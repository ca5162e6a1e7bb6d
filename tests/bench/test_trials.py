"""Grids of trials: `tvq bench variants` and `tvq bench scaling`, resuming them, their records."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from statistics import mean

import pytest
from helpers import tiny_run

from transformer_vq.bench import scaling, trials, variants
from transformer_vq.bench.plots import plot_path
from transformer_vq.bench.trials import Trial, run_grid, run_trials, trials_of, write_spec
from transformer_vq.cli.main import main
from transformer_vq.errors import UserError
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.evaluate import evaluate

SHORT = {"steps": 4, "eval_every": 4, "save_every": 4, "eval_tokens": 100}


def fake_row(config, variant, seed, test, parameters=1000, n_code=16):
    position = {"first": 63, "last": 126, "tokens": 2000, "nats_per_token": test}
    later = {"first": 127, "last": 254, "tokens": 2000, "nats_per_token": test - 0.1}
    model = replace(config.model, n_code=n_code)
    return {
        "name": f"{variant}-seed-{seed}",
        "variant": variant,
        "seed": seed,
        "config": trials.config_record(
            replace(config, model=model, train=replace(config.train, seed=seed))
        ),
        "corpus": "0" * 64,
        "parameters": parameters,
        "validation": test + 0.01,
        "test": test,
        "by_position": [position, later],
        "curve": [],
    }


def test_trials_have_every_variant_with_every_seed(tmp_path):
    base = tiny_run(tmp_path)
    found = trials_of({"a": base, "b": base}, 2)
    assert [trial.name for trial in found] == ["a-seed-0", "b-seed-0", "a-seed-1", "b-seed-1"]
    assert [trial.config.train.seed for trial in found] == [0, 0, 1, 1]


def test_variants_change_the_named_fields_only(tmp_path):
    base = tiny_run(tmp_path)
    found = variants.variants_of(
        base, ["vq", "full:model.attention=full", "no:model.compressive-cache=false,optim.lr=0.5"]
    )
    assert found["vq"] == base
    assert found["full"] == replace(base, model=replace(base.model, attention="full"))
    assert set(found["no"].differences(base)) == {"model.compressive_cache", "optim.lr"}


@pytest.mark.parametrize(
    "text",
    ["", ":model.n_code=5", "a:model", "a:model.nope=3", "a:n_code=3", "a:train.seed=3", "a/b"],
)
def test_variants_reject_anything_else(text, tmp_path):
    with pytest.raises(UserError, match="--variants"):
        variants.variants_of(tiny_run(tmp_path), [text])


def test_variants_reject_a_name_that_is_given_twice(tmp_path):
    with pytest.raises(UserError, match="twice"):
        variants.variants_of(tiny_run(tmp_path), ["a", "a:model.n_code=5"])


def test_command_trains_evaluates_and_skips_what_is_recorded(tmp_path, monkeypatch, capsys):
    base = tiny_run(tmp_path, train=SHORT)
    out, runs = tmp_path / "variants.json", tmp_path / "runs"
    options = ["--variants", "vq", "full:model.attention=full", "--seeds", "1", "--jobs", "2"]
    monkeypatch.setattr("transformer_vq.cli.bench.variants.PRESETS", {"tiny": base})
    command = ["bench", "variants", *options, "--out", str(out), "--runs", str(runs)]
    main([*command, "--position-len", "96", "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(out.read_text())
    assert json.loads(last) == record
    assert "\n".join(table) == variants.table(record)
    assert [row["variant"] for row in record["trials"]] == ["vq", "full"]
    for row in record["trials"]:
        run = runs / row["name"]
        assert read_config(run).model.attention == row["variant"]
        for split in ("validation", "test"):
            want = evaluate(run, split=split, protocols=["windowed"]).protocols["windowed"]
            assert row[split] == want.bits_per_byte
        assert row["position_len"] == 96
        long = evaluate(run, split="test", protocols=["windowed"], seq_len=96)
        assert row["by_position"] == long.protocols["windowed"].to_dict()["by_position"]
        assert row["tokens"] == 4 * 4 * 16
    assert str(tmp_path) not in last

    monkeypatch.setattr(trials, "_start", None)  # calling it would fail
    main(command)
    assert capsys.readouterr().out.splitlines() == table
    assert json.loads(out.read_text()) == record
    assert plot_path(out)[0].stat().st_size > 10_000
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--optim.lr", "0.5"])
    assert stopped.value.code == 2
    assert "optim.lr" in capsys.readouterr().err


def test_trials_of_another_process_are_read_from_their_result_files(tmp_path):
    base = tiny_run(tmp_path, train=SHORT)
    trial = Trial("vq", 0, base)
    runs = tmp_path / "runs"
    runs.mkdir()
    row = json.loads(json.dumps(fake_row(base, "vq", 0, 2.0, n_code=base.model.n_code)))
    (runs / "vq-seed-0.json").write_text(json.dumps(row))
    assert list(run_trials([trial], runs)) == [row]
    assert list(run_trials([trial], runs, [row])) == []  # recorded, so it is not new
    other = replace(trial, config=replace(base, model=replace(base.model, n_code=5)))
    with pytest.raises(UserError, match=r"model\.n_code"):
        list(run_trials([other], runs))


def test_trials_on_other_data_are_not_mixed_in_one_record(tmp_path):
    base = tiny_run(tmp_path, train=SHORT)
    runs, out = tmp_path / "runs", tmp_path / "out.json"
    runs.mkdir()
    first, second = (fake_row(base, "vq", seed, 2.0, n_code=base.model.n_code) for seed in (0, 1))
    out.write_text(json.dumps({"trials": [first]}))
    (runs / "vq-seed-1.json").write_text(json.dumps(second | {"corpus": "1" * 64}))
    before = out.read_text()
    with pytest.raises(UserError, match="other data"):
        run_grid(trials_of({"vq": base}, 2), runs, out, 1, variants.record)
    assert out.read_text() == before
    (runs / "vq-seed-1.json").write_text(json.dumps(second))
    rows, stopped = run_grid(trials_of({"vq": base}, 2), runs, out, 1, variants.record)
    assert ([row["seed"] for row in rows], stopped) == ([0, 1], False)


def test_failed_trial_is_reported_with_its_reason(tmp_path):
    base = tiny_run(tmp_path, train=SHORT)
    missing = replace(base, data=replace(base.data, path=(str(tmp_path / "missing"),)))
    with pytest.raises(UserError, match=r"vq-seed-0 failed: .*missing"):
        run_grid([Trial("vq", 0, missing)], tmp_path / "runs", tmp_path / "out.json", 1, dict)


def test_record_of_another_kind_is_not_overwritten(tmp_path):
    out = tmp_path / "out.json"
    out.write_text('{"decode": []}')
    with pytest.raises(UserError, match="another --out"):
        run_grid([], tmp_path / "runs", out, 1, dict)
    assert out.read_text() == '{"decode": []}'


GRID = """
import sys
from pathlib import Path
from helpers import tiny_run
from transformer_vq.bench.trials import Trial, run_grid
folder = Path(sys.argv[1])
base = tiny_run(folder, train={"steps": 100_000, "eval_every": 100_000, "save_every": 100_000})
trials = [Trial("vq", 0, base)]
print(run_grid(trials, folder / "runs", folder / "out.json", 1, lambda rows: {"trials": rows}))
"""


@pytest.mark.slow
def test_interrupted_grid_saves_its_runs(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", GRID, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    metrics = tmp_path / "runs" / "vq-seed-0" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert output.strip() == "([], True)"
    assert list((metrics.parent / "checkpoints").glob("step-*"))
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_trial_saves_and_ends_without_its_parent(tmp_path):
    base = tiny_run(tmp_path, train={"steps": 100_000, "eval_every": 100_000})
    spec = write_spec(Trial("vq", 0, base), tmp_path / "runs")
    no_process = 2**22 + 1
    command = [sys.executable, "-m", "transformer_vq.bench.trial", str(spec), str(no_process)]
    assert subprocess.run(command, timeout=120, capture_output=True).returncode != 0
    assert not (tmp_path / "runs" / "vq-seed-0.json").exists()


def test_table_of_variants_compares_pairs_of_seeds(tmp_path):
    base = tiny_run(tmp_path)
    rows = [
        fake_row(base, "full", 0, 2.0),
        fake_row(base, "full", 1, 2.2),
        fake_row(base, "vq", 0, 2.1),
        fake_row(base, "vq", 1, 2.3),
        fake_row(base, "vq", 2, 9.9),  # without a partner
    ]
    record = variants.record(rows)
    first, second = variants.table(record).splitlines()[2:]
    assert first.startswith("| full | 1,000 | 2 |")
    assert "2.1000 ± 0.1414" in first
    assert "| +0.1000 ± 0.0000 |" in second
    assert f"{mean([2.1 / 2.0, 2.3 / 2.2]) - 1:+.2%}" in second


def test_scaling_fits_both_grids_and_plots_them(tmp_path):
    base = tiny_run(tmp_path)
    rows = []
    for seed in range(3):
        for n_code in (16, 32, 64, 128):
            noise = 0.001 * (seed - 1)
            bits = 2.0 + n_code**-0.5 + noise
            rows.append(fake_row(base, f"codes-{n_code}", seed, bits, n_code=n_code))
        for d_model, parameters in ((64, 100_000), (128, 400_000), (256, 1_600_000)):
            bits = 1.5 + 20 * parameters**-0.3 + noise
            rows.append(fake_row(base, f"size-{d_model}x2", seed, bits, parameters))
    record = scaling.record(rows)
    assert record["scaling"] == ["codes", "sizes"]
    assert record["codes"]["exponent"] == pytest.approx(0.5, rel=0.02)
    assert record["codes"]["floor"] == pytest.approx(2.0, abs=0.01)
    assert record["sizes"]["exponent"] == pytest.approx(0.3, rel=0.02)
    low, high = record["codes"]["exponent_interval"]
    assert low < 0.5 < high
    expected = (2.0 + 128**-0.5) / (2.0 + 64**-0.5)
    assert record["codes"]["factor_per_doubling"] == pytest.approx(expected, abs=1e-3)
    text = scaling.table(record)
    assert "| 128 | 3 | 2.0884 ± 0.0010 |" in text
    assert "0.995" in text
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps(record))
    assert plot_path(path)[0].stat().st_size > 10_000


def test_scaling_variants_change_codes_and_sizes(tmp_path):
    base = tiny_run(tmp_path)
    found = scaling.code_variants(base, [8, 4, 8]) | scaling.size_variants(base, ["32x3"])
    assert list(found) == ["codes-4", "codes-8", "size-32x3"]
    assert found["codes-4"].model == replace(base.model, n_code=4)
    assert found["size-32x3"].model == replace(base.model, d_model=32, n_layer=3)


@pytest.mark.parametrize("size", ["128", "x2", "128x", "ax2", "128x2x2"])
def test_scaling_rejects_a_malformed_size(size, tmp_path):
    with pytest.raises(UserError, match="--sizes"):
        scaling.size_variants(tiny_run(tmp_path), [size])
