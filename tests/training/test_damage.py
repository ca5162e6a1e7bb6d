"""What goes wrong under a run: damaged files, a full disk, numbers that are not finite."""

import resource

import pytest
import torch
from helpers import interrupt_after, losses, tiny_run

from transformer_vq import files
from transformer_vq.training.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoint_steps,
    load_model,
)
from transformer_vq.training.loop import TrainingError
from transformer_vq.training.run import resume, train
from transformer_vq.training.step import Trainer


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, monkeypatch, capsys):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        train(config, tmp_path / "cut")
    assert checkpoint_steps(tmp_path / "cut") == [6, 8]
    damaged = checkpoint_folder(tmp_path / "cut", 8) / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1  # one bit, of the right length
    damaged.write_bytes(data)
    capsys.readouterr()
    assert resume(tmp_path / "cut").finished
    assert "corrupt" in capsys.readouterr().err
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "training.json"])
def test_a_checkpoint_cut_short_is_not_mistaken_for_one(tmp_path, name):
    config = tiny_run(tmp_path, train={"steps": 6})
    train(config, tmp_path / "run")
    path = checkpoint_folder(tmp_path / "run", 6) / name
    path.write_bytes(path.read_bytes()[:100])
    assert load_model(tmp_path / "run", "last")[1] == "step 3"


def test_no_checkpoint_that_can_be_read_is_an_error(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3}), tmp_path / "run")
    for step in checkpoint_steps(tmp_path / "run"):
        (checkpoint_folder(tmp_path / "run", step) / "training.json").write_text("{")
    with pytest.raises(CheckpointError, match="are corrupt"):
        resume(tmp_path / "run")


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, capsys):
    """Files above a limit cannot be written, as on a disk that is full; the best model neither."""
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_tensors = files.save_file

    def write_on_full_disk(tensors, path, metadata=None):
        if "step-00000003" not in str(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write_tensors(tensors, path, metadata=metadata)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", write_on_full_disk)
        with pytest.raises(TrainingError, match=r"cannot save step 10.*last checkpoint is step 3"):
            train(config, tmp_path / "full")
    said = capsys.readouterr().err
    assert "cannot save step 6" in said
    assert "cannot save the best model" in said
    assert checkpoint_steps(tmp_path / "full") == [3]
    assert list((tmp_path / "full").rglob(".*partial*")) == []
    resume(tmp_path / "full")
    assert losses(tmp_path / "full") == losses(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    update = Trainer.update

    def broken(self, batch, step, begins):
        if step == 7:
            with torch.no_grad():
                self.model.embed.weight.fill_(float("nan"))
        return update(self, batch, step, begins)

    monkeypatch.setattr(Trainer, "update", broken)
    with pytest.raises(TrainingError, match=r"step 8 is not finite.*the last checkpoint is step 6"):
        train(tiny_run(tmp_path), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [3, 6]
    state = load_model(tmp_path / "run", "last")[0].state_dict()
    assert all(x.isfinite().all() for x in state.values())
