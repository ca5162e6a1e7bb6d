"""The moving average of the weights: its formula, validation, checkpoints."""

import torch
from helpers import assert_close, losses, relative_rms, tiny_run

from transformer_vq.training import loop
from transformer_vq.training.checkpoint import load_model, newest_checkpoint
from transformer_vq.training.run import train
from transformer_vq.training.step import Trainer


def averaging(folder, **changes):
    changes = {"optim": {"lr": 0.02}} | changes
    train = {"weight_average": 0.8, "accumulate": 2} | changes.pop("train", {})
    return tiny_run(folder, **changes, train=train)


def test_average_follows_its_formula(tmp_path, monkeypatch):
    weights, train_step = [], Trainer.step

    def recorded(self, *args, **kwargs):
        weights.append(self.model.embed.weight.detach().double())
        return train_step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", recorded)
    train(averaging(tmp_path), tmp_path / "run")
    checkpoint = newest_checkpoint(tmp_path / "run")
    want, *after = [*weights, checkpoint.model.embed.weight.detach().double()]
    assert len(after) == 10
    for t, x in enumerate(after):
        decay = min(0.8, (1 + t) / (10 + t))
        want = decay * want + (1 - decay) * x
    got = checkpoint.tensors["average/embed.weight"]
    assert got.dtype == torch.float32
    assert_close("average", got.double(), want, 1e-6)
    assert relative_rms(got, after[-1]) > 1e-3


def test_best_has_averaged_weights_and_last_the_trained_ones(tmp_path, monkeypatch):
    scored, score = [], loop.score

    def recorded(model, *args, **kwargs):
        scored.append(model.embed.weight.detach().clone())
        return score(model, *args, **kwargs)

    monkeypatch.setattr(loop, "score", recorded)
    train(averaging(tmp_path, train={"eval_every": 100}), tmp_path / "run")
    checkpoint = newest_checkpoint(tmp_path / "run")
    average = checkpoint.tensors["average/embed.weight"]
    best, last = (load_model(tmp_path / "run", which)[0] for which in ("best", "last"))
    assert len(scored) == 1
    assert scored[0].equal(average)
    assert best.embed.weight.equal(average)
    assert last.embed.weight.equal(checkpoint.model.embed.weight)
    assert not last.embed.weight.equal(average)
    codebooks = [m.branches[0].quantizer.c_sum for m in (best, last)]
    assert codebooks[0].equal(codebooks[1])


def test_average_does_not_affect_training(tmp_path):
    train(averaging(tmp_path), tmp_path / "with")
    train(averaging(tmp_path, train={"weight_average": 0.0}), tmp_path / "without")
    got, want = (
        [row for row in losses(tmp_path / name) if row[0] == "train"]
        for name in ("with", "without")
    )
    assert got == want
    assert "average/embed.weight" not in newest_checkpoint(tmp_path / "without").tensors
