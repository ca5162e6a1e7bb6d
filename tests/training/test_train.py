"""A run from its start: what it leaves on disk, what it logs, what it refuses."""

import math
import sys
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from helpers import losses, tiny_run

from transformer_vq import TransformerVQ
from transformer_vq.errors import UserError
from transformer_vq.training import loop
from transformer_vq.training import run as runs
from transformer_vq.training.checkpoint import (
    CheckpointError,
    checkpoint_steps,
    load_model,
    read_config,
)
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train


def test_a_run_leaves_all_its_files(tmp_path):
    config = tiny_run(tmp_path)
    result = train(config, tmp_path / "run")
    run = tmp_path / "run"
    assert result.finished
    assert read_config(run) == config
    assert checkpoint_steps(run) == [9, 10]
    rows = read_metrics(run)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 11))
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [4, 8, 10]
    assert 0 < rows[0]["share_in_use"] <= 1
    assert rows[0]["lr"] == 0.0
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["nats_per_token"] / math.log(2))
    valid = [row["nats_per_token"] for row in rows if row["kind"] == "validation"]
    assert result.best_loss == min(valid)
    assert load_model(run)[1] == "best"
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []


def test_codebooks_are_looked_at_only_when_it_is_logged(tmp_path, monkeypatch):
    steps, notes = [], []
    health, update = loop._health, loop.TrainingLoop._update

    def counted(seen):
        steps.append(len(notes) + 1)
        return health(seen)

    def noted(self, log):
        notes.append(update(self, log))
        return notes[-1]

    monkeypatch.setattr(loop, "_health", counted)
    monkeypatch.setattr(loop.TrainingLoop, "_update", noted)
    train(tiny_run(tmp_path, train={"log_every": 4}), tmp_path / "run")
    assert steps == [4, 8]
    shares = {
        row["step"]: f"{row['share_in_use']:.0%} of codes in use"
        for row in read_metrics(tmp_path / "run")
        if row["kind"] == "train"
    }
    # The note keeps what was last known.
    assert all("codes" not in note for note in notes[:3])
    assert all(note.endswith(shares[4]) for note in notes[3:7])
    assert all(note.endswith(shares[8]) for note in notes[7:])


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="tvq resume"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_logger_that_is_not_installed_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        train(tiny_run(tmp_path, train={"wandb": "project"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_get_the_same_numbers(tmp_path, monkeypatch):
    class Fake(types.ModuleType):
        rows: ClassVar[list] = []

        def init(self, **options):
            assert options["project"] == "mine"
            return self

        def log(self, row, step):
            self.rows.append((step, row))

        def finish(self):
            self.rows.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", Fake("wandb"))
    train(tiny_run(tmp_path, train={"steps": 2, "wandb": "mine"}), tmp_path / "run")
    logged = [row["train/nats_per_token"] for _, row in Fake.rows[:2]]
    assert logged == [loss for kind, _, loss in losses(tmp_path / "run") if kind == "train"]
    assert Fake.rows[-1] == "finished"


def test_tensorboard_gets_the_same_numbers(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3, "tensorboard": True}), tmp_path / "run")
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/nats_per_token" in files[0].read_bytes()


@pytest.mark.parametrize(("memory", "parts"), [(1 << 40, 1), (300_000, 4), (0, 4)])
def test_the_batch_is_divided_until_it_fits(tmp_path, monkeypatch, memory, parts):
    monkeypatch.setattr(runs, "total_memory", lambda device: memory)
    monkeypatch.setattr(runs, "_check_memory", lambda config, world: None)
    train(tiny_run(tmp_path, train={"steps": 1, "accumulate": 0}), tmp_path / "run")
    assert read_config(tmp_path / "run").train.accumulate == parts


def test_a_model_that_cannot_fit_is_rejected_before_it_is_built(tmp_path):
    huge = tiny_run(tmp_path, model={"d_model": 2**20}, train={"steps": 1})
    with pytest.raises(UserError, match=r"out of memory: .* TB|out of memory: .* GB"):
        train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_can_start_from_the_weights_of_another(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "first")
    second = replace(
        config, train=replace(config.train, init_from=str(tmp_path / "first"), steps=1)
    )
    train(second, tmp_path / "second")
    # The first update has a learning rate of zero: weights are those of the other run.
    first = load_model(tmp_path / "first")[0]
    after = load_model(tmp_path / "second", "last")[0]
    decayed = 1 - config.optim.weight_decay
    assert torch.equal(after.embed.weight, first.embed.weight * decayed)
    wrong = replace(second, model=replace(second.model, n_code=9))
    with pytest.raises(CheckpointError, match=r"model\.n_code"):
        train(wrong, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_the_model_of_a_run_loads_as_any_model(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    model = TransformerVQ.load(tmp_path / "run" / "best" / "model.safetensors")
    assert model.config == config.model
    assert load_model(tmp_path / "run", "3")[1] == "step 3"
    with pytest.raises(CheckpointError, match="no checkpoint '99'"):
        load_model(tmp_path / "run", "99")
