"""Config files, fine-tuning, lists of runs and comparisons."""

import json
import os
import time
import tomllib

from helpers import tiny_run
from test_cli import last_json, options, user_error

from transformer_vq.cli.main import main
from transformer_vq.config_files import config_text
from transformer_vq.presets import PRESETS
from transformer_vq.training.checkpoint import read_config

MODEL = ("vocab_size", "d_model", "n_layer", "d_k", "n_code", "block_len")


def printed(capsys, *arguments):
    capsys.readouterr()
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_later_sources_override_earlier_ones(tmp_path, capsys):
    path = tmp_path / "my.toml"
    path.write_text('preset = "small"\n[model]\nn-code = 64\nblock_len = 32\n')
    line = ["--config", path, "--model.block-len", "16", "--optim.grad-clip", "None"]
    small = tomllib.loads(printed(capsys, "config", *line))
    assert small["optim"]["grad_clip"] == "None"
    assert small["model"]["n_code"] == 64
    assert small["model"]["block_len"] == 16
    assert small["model"]["d_model"] == PRESETS["small"].model.d_model
    tiny = tomllib.loads(printed(capsys, "config", "tiny", *line))
    assert tiny["model"]["n_code"] == 64
    assert tiny["model"]["d_model"] == PRESETS["tiny"].model.d_model
    main(["info", "--config", str(path), "--json"])
    assert last_json(capsys)["name"] == "my"


def test_errors_in_config_files_name_the_key_as_written(tmp_path, capsys):
    path = tmp_path / "my.toml"
    path.write_text('preset = "tiny"\n[model]\nn_code = 0\n')
    line = user_error(capsys, "train", "--config", path)
    assert line == f"tvq: {path}: model.n_code=0: must be an integer of at least 1"


def test_training_tunes_lists_and_compares_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(config_text(tiny_run(tmp_path)))
    main(["train", "--config", "my.toml", "--train.steps", "5"])
    config = read_config(tmp_path / "runs" / "my")
    assert config.train.steps == 5
    assert config.model == tiny_run(tmp_path).model
    # The second run starts from the weights of the first, and so with its model.
    fine_tuned = ["train", "tiny", *options(tmp_path, without=MODEL), "--out", "runs/tuned"]
    main([*fine_tuned, "--train.init-from", "runs/my", "--model.p-dropres", "0.25"])
    tuned = read_config(tmp_path / "runs" / "tuned").model
    assert (tuned.d_model, tuned.n_code) == (config.model.d_model, config.model.n_code)
    assert tuned.p_dropres == 0.25
    # The config of the second run is complete without the first one.
    (tmp_path / "runs" / "my").rename(tmp_path / "runs" / "moved")
    assert f"d_model = {tuned.d_model}\n" in printed(capsys, "config", "runs/tuned")
    (tmp_path / "runs" / "moved").rename(tmp_path / "runs" / "my")

    old = time.time() - 1000
    for path in (tmp_path / "runs" / "my").rglob("*"):
        os.utime(path, (old, old))
    out = printed(capsys, "runs", "--json")
    header, first, second, record = out.splitlines()
    assert header.split()[:3] == ["run", "status", "steps"]
    assert first.split()[:3] == ["tuned", "finished", "10/10"]
    assert second.split()[:3] == ["my", "finished", "5/5"]
    assert [run["name"] for run in json.loads(record)["runs"]] == ["tuned", "my"]
    names = [line.split()[0] for line in printed(capsys, "runs", "--sort", "name").splitlines()]
    assert names == ["run", "my", "tuned"]

    assert printed(capsys, "plot", "runs/my", "runs/tuned", "--x", "time") == "comparison.png\n"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "the file exists" in user_error(capsys, "plot", "runs/my", "runs/tuned")


def test_runs_explains_how_to_start_if_there_are_none(tmp_path, capsys):
    out = printed(capsys, "runs", tmp_path, "--json")
    assert "tvq train tiny" in out.splitlines()[0]
    assert json.loads(out.splitlines()[1])["runs"] == []


def test_runs_shows_corrupt_runs_and_names_with_markup(tmp_path, capsys):
    run = tmp_path / "a-long-[bold]name"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    _, row = printed(capsys, "runs", tmp_path).splitlines()
    assert row.split()[:3] == [run.name, "corrupt", "-"]
