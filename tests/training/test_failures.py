"""Failures during a run: corrupt files, a full disk, a loss that is not finite."""

import resource
from types import SimpleNamespace

import pytest
import torch
from helpers import interrupted, losses, tiny_run

from transformer_vq import TransformerVQ, files, load_run
from transformer_vq.cli.main import main
from transformer_vq.errors import TrainingError
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.parallel import storage
from transformer_vq.parallel.shards import read_whole
from transformer_vq.training.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoint_steps,
    load_model,
    newest_checkpoint,
)
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import resume, train
from transformer_vq.training.step import Trainer


def test_resume_skips_a_corrupt_checkpoint_with_a_warning(tmp_path, capsys):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "uninterrupted")
    interrupted(7, train, config, tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [6, 8]
    corrupt = checkpoint_folder(tmp_path / "run", 8) / "shard-00000.safetensors"
    data = bytearray(corrupt.read_bytes())
    data[-1] ^= 1  # one bit; the length stays the same
    corrupt.write_bytes(data)
    capsys.readouterr()
    assert resume(tmp_path / "run").finished
    assert "corrupt" in capsys.readouterr().err
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")


def test_weights_that_are_not_finite_are_reported_and_their_checkpoint_is_skipped(tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny_run(tmp_path, train={"steps": 6}), run)
    newest = checkpoint_folder(run, 6)
    best, checkpoint = run / "best" / "model.safetensors", newest_checkpoint(run)
    model = TransformerVQ.load(best)
    torch.nn.init.constant_(model.head.bias, torch.nan)
    model.save(best)
    saved = read_whole(newest, checkpoint.index)
    saved["model/head.bias"].fill_(torch.nan)
    files.write_safetensors(newest / "shard-00000.safetensors", saved)
    files.write_manifest(newest)
    for load in (load_run, lambda path: load_run(path, "6")):
        with pytest.raises(NotFiniteError, match=r"head\.bias contains NaN"):
            load(run)
    capsys.readouterr()
    assert load_model(run, "last")[1] == "step 3"
    assert "head.bias contains NaN" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["sample", str(run)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "head.bias contains NaN" in line


def test_resume_fails_if_all_checkpoints_are_corrupt(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3}), tmp_path / "run")
    for step in checkpoint_steps(tmp_path / "run"):
        (checkpoint_folder(tmp_path / "run", step) / "training.json").write_text("{")
    with pytest.raises(CheckpointError, match="are corrupt"):
        resume(tmp_path / "run")


def test_resume_after_a_full_disk_gives_the_same_losses(tmp_path, monkeypatch, capsys):
    """A limit on the file size simulates the full disk; the best model cannot be saved either."""
    config = tiny_run(tmp_path)
    train(config, tmp_path / "uninterrupted")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = files.write_safetensors

    def write_on_full_disk(path, *args):
        if "step-00000003" not in str(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write(path, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_safetensors", write_on_full_disk)
        with pytest.raises(TrainingError, match=r"cannot save step 10.*last checkpoint is step 3"):
            train(config, tmp_path / "full")
    printed = capsys.readouterr().err
    assert "cannot save step 6" in printed
    assert "cannot save the best model" in printed
    assert checkpoint_steps(tmp_path / "full") == [3]
    assert list((tmp_path / "full").rglob(".*partial*")) == []
    resume(tmp_path / "full")
    assert losses(tmp_path / "full") == losses(tmp_path / "uninterrupted")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_checkpoints(tmp_path, monkeypatch):
    train_step = Trainer.step

    def broken(self, batch, step, **options):
        if step == 7:
            with torch.no_grad():
                self.model.embed.weight.fill_(float("nan"))
        return train_step(self, batch, step, **options)

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(TrainingError, match=r"step 8 is not finite.*the last checkpoint is step 6"):
        train(tiny_run(tmp_path), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [3, 6]
    state = load_model(tmp_path / "run", "last")[0].state_dict()
    assert all(x.isfinite().all() for x in state.values())


@pytest.fixture
def deferred(monkeypatch):
    """Check losses as on a GPU: only when they are logged, and before anything is saved.

    Also calls `deferred.before[step]` before that step, and `deferred.after[step]` after it.
    """
    train_step, hooks = Trainer.step, SimpleNamespace(before={}, after={})

    def step_on_gpu(self, batch, step, **options):
        self.checks_each_step = False
        hooks.before.get(step, lambda _: None)(self.model)
        result = train_step(self, batch, step, **options)
        hooks.after.get(step, lambda _: None)(self.model)
        return result

    monkeypatch.setattr(Trainer, "step", step_on_gpu)
    monkeypatch.setattr("transformer_vq.nn.quantizer.is_readable", lambda keys: False)
    return hooks


def test_deferred_checks_change_no_results(tmp_path, request):
    config = tiny_run(tmp_path, train={"log_every": 5})
    train(config, tmp_path / "now")
    request.getfixturevalue("deferred")
    train(config, tmp_path / "later")
    assert losses(tmp_path / "later") == losses(tmp_path / "now")
    now, later = (load_model(tmp_path / name, "last")[0].state_dict() for name in ("now", "later"))
    assert all(torch.equal(later[name], x) for name, x in now.items())


@pytest.mark.parametrize(
    ("when", "due", "message"),
    [
        # The loss of step 5 is NaN; steps 6 and 7 are taken before anything is due at step 7.
        ("before", {"log_every": 7}, r"\(loss nan"),
        ("before", {"eval_every": 7}, r"\(loss nan"),
        ("before", {"save_every": 7}, r"\(loss nan"),
        # The update of step 5 overflows, and no later loss shows it before the model is saved.
        ("after", {"eval_every": 5}, ".*no checkpoint exists"),
        ("after", {"save_every": 5}, ".*no checkpoint exists"),
    ],
)
def test_deferred_checks_report_the_first_step_that_is_not_finite(
    tmp_path, deferred, when, due, message
):
    def spoil(model):
        with torch.no_grad():
            model.head.bias[0] = float("nan" if when == "before" else "inf")

    getattr(deferred, when)[4] = spoil
    every = {"log_every": 99, "eval_every": 99, "save_every": 99} | due
    with pytest.raises(TrainingError, match=f"step 5 is not finite *{message}"):
        train(tiny_run(tmp_path, train=every), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == []
    assert not (tmp_path / "run" / "best").exists()
    assert [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"] == []
