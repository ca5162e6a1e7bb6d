"""Resume: the same results as without an interruption, and only with the same config."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_same_runs, interrupted, losses, tiny_run

from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.training import run as runs
from transformer_vq.training.checkpoint import (
    CheckpointError,
    load_model,
    locked,
    read_config,
    write_config,
)
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import resume, train


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": {"optimizer": "adafactor"}, "train": {"accumulate": 2}},
        {"optim": {"optimizer": "muon"}, "train": {"accumulate": 2, "batch_size": 2}},
        {"model": {"attention": "full"}, "train": {"batch_size": 2}},
        {"optim": {"lr": 0.02}, "train": {"accumulate": 2, "weight_average": 0.8}},
    ],
    ids=str,
)
def test_resume_twice_after_signals_gives_the_same_losses_and_weights(tmp_path, changes):
    config = tiny_run(tmp_path, **{"model": {"p_droplyr": 0.3}} | changes)
    train(config, tmp_path / "uninterrupted")
    result = interrupted(1, train, config, tmp_path / "run")
    assert (result.step, result.finished, result.stopped_by) == (2, False, signal.SIGINT)
    assert interrupted(6, resume, tmp_path / "run").step == 7
    assert resume(tmp_path / "run").finished
    assert_same_runs(tmp_path / "run", tmp_path / "uninterrupted")


def test_resume_without_a_checkpoint_starts_from_the_first_step(tmp_path):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "uninterrupted")
    run = tmp_path / "started"
    run.mkdir()
    write_config(run, config, ByteTokenizer())
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "nats_per_token": 9.0}\n{"ki')
    assert resume(run).finished
    assert losses(run) == losses(tmp_path / "uninterrupted")


def test_equal_runs_give_equal_files(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 4})
    for name in ("one", "other"):
        train(config, tmp_path / name)
    one, other = tmp_path / "one", tmp_path / "other"
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    timed = {Path("metrics.jsonl"), Path("history.jsonl")}
    differ = [p for p in files if (one / p).read_bytes() != (other / p).read_bytes()]
    assert set(differ) <= timed
    assert len(files) > 6


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_train_rejects_a_folder_with_files_of_something_else(tmp_path, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"out contains {name}.*another --out"):
        train(tiny_run(tmp_path), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("option", ["eval_every", "log_every"])
def test_logging_validation_and_checkpoint_intervals_do_not_affect_training(tmp_path, option):
    """Codebooks are initialized from keys and revived, so every step draws random candidates."""
    candidates = {"codebook_init": "keys", "revive_below": 0.5}
    config = tiny_run(tmp_path, model=candidates)
    train(config, tmp_path / "one")
    train(replace(config, train=replace(config.train, **{option: 2})), tmp_path / "other")

    def by_step(run):
        rows = read_metrics(run)
        return {row["step"]: row["nats_per_token"] for row in rows if row["kind"] == "train"}

    one, other = by_step(tmp_path / "one"), by_step(tmp_path / "other")
    assert other == {step: one[step] for step in other}
    assert len(other) == (5 if option == "log_every" else 10)
    models = [load_model(tmp_path / name, "last")[0].state_dict() for name in ("one", "other")]
    assert all(torch.equal(x, models[1][name]) for name, x in models[0].items())


def test_train_does_not_overwrite_a_run_started_at_the_same_time(tmp_path, monkeypatch):
    """The other run appears after the first check of the folder; the second one is locked."""
    config = tiny_run(tmp_path, train={"steps": 3})
    prepare_corpus = runs._prepare_corpus

    def while_another_starts(*arguments):
        corpus = prepare_corpus(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "_prepare_corpus", prepare_corpus)
            train(config, tmp_path / "run")
        return corpus

    monkeypatch.setattr(runs, "_prepare_corpus", while_another_starts)
    with pytest.raises(CheckpointError, match="already contains a run"):
        train(replace(config, train=replace(config.train, seed=5)), tmp_path / "run")
    assert read_config(tmp_path / "run").train.seed == 0
    assert load_model(tmp_path / "run", "last")[1] == "step 3"


def test_read_metrics_warns_about_corrupt_lines_and_returns_the_others(tmp_path, capsys):
    train(tiny_run(tmp_path, train={"steps": 4}), tmp_path / "run")
    path, before = tmp_path / "run" / "metrics.jsonl", losses(tmp_path / "run")
    lines = path.read_text().splitlines(keepends=True)
    for damage in ("{", "null\n", "[" * 100_000 + "\n", '{"kind": 3}\n', "\xff\n"):
        path.write_text("".join([lines[0], damage, *lines[2:]]))
        capsys.readouterr()
        if damage.endswith("\n"):
            assert losses(tmp_path / "run") == [before[0], *before[2:]]
            assert "1 of" in capsys.readouterr().err
        else:  # without a line end it also makes the next line corrupt
            assert losses(tmp_path / "run") == [before[0], *before[3:]]
            assert "line 2" in capsys.readouterr().err
    # An unfinished last line, as after a crash, is not reported.
    path.write_text("".join(lines)[:-5])
    assert losses(tmp_path / "run") == before[:-1]
    assert capsys.readouterr().err == ""


def test_resume_rejects_changed_data(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    (Path(config.data.path[0]) / "0.txt").write_text("other words " * 200)
    with pytest.raises(CheckpointError, match=r"data of .* have changed"):
        resume(tmp_path / "run")


def test_resume_works_from_another_working_directory(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = replace(config, data=replace(config.data, path="text"))
    interrupted(4, train, relative, Path("run"))
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run").finished


def test_resume_rejects_a_run_in_use_by_another_process(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(CheckpointError, match="another process"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("n_kept", "missing"),
    [
        (None, "steps 1 to 6 and the validation of step 4"),
        (4, "steps 5 to 6 and the validation of step 4"),
        (6, "step 6"),
    ],
)
def test_resume_warns_once_about_missing_metrics(tmp_path, capsys, n_kept, missing):
    interrupted(5, train, tiny_run(tmp_path), tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 7  # six steps and a validation
    path.unlink() if n_kept is None else path.write_text("".join(lines[:n_kept]))
    capsys.readouterr()
    assert resume(tmp_path / "run").finished
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "metrics.jsonl" in x]
    assert f"the rows of {missing} are missing" in line
    assert resume(tmp_path / "run").finished
    assert "metrics.jsonl" not in capsys.readouterr().err
