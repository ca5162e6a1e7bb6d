"""Training runs: the files they write, their metrics, and invalid requests."""

import math
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import interrupt_after, losses, tiny_run

from transformer_vq import TransformerVQ
from transformer_vq.data.prepare import prepare
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
from transformer_vq.training.run import resume, train


def test_train_writes_all_files_of_a_run(tmp_path):
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
    size = prepare(config.data).sizes["train"]
    bits = rows[0]["nats_per_token"] / math.log(2) * size.tokens / size.bytes
    assert rows[0]["bits_per_byte"] == pytest.approx(bits)
    valid = [row["nats_per_token"] for row in rows if row["kind"] == "validation"]
    assert result.best_loss == min(valid)
    assert load_model(run)[1] == "best"
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []


def test_codebook_health_is_computed_only_for_logged_steps(tmp_path, monkeypatch):
    steps, notes = [], []
    health, train_step = loop._health, loop.TrainingLoop._train_step

    def counted(result):
        steps.append(len(notes) + 1)
        return health(result)

    def noted(self, log):
        notes.append(train_step(self, log))
        return notes[-1]

    monkeypatch.setattr(loop, "_health", counted)
    monkeypatch.setattr(loop.TrainingLoop, "_train_step", noted)
    train(tiny_run(tmp_path, train={"log_every": 4}), tmp_path / "run")
    assert steps == [4, 8]
    shares = {
        row["step"]: f"{row['share_in_use']:.0%} codes"
        for row in read_metrics(tmp_path / "run")
        if row["kind"] == "train"
    }
    # The note shows the last known value.
    assert all("codes" not in note for note in notes[:3])
    assert all(note.endswith(shares[4]) for note in notes[3:7])
    assert all(note.endswith(shares[8]) for note in notes[7:])


def test_train_rejects_a_folder_that_contains_a_run(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="tvq resume"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_train_rejects_a_missing_logger_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        train(tiny_run(tmp_path, train={"wandb": "project"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_wandb_receives_the_same_values(tmp_path, monkeypatch):
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


def test_tensorboard_receives_the_same_values(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3, "tensorboard": True}), tmp_path / "run")
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/nats_per_token" in files[0].read_bytes()


@pytest.mark.parametrize(("memory", "accumulate"), [(1 << 40, 1), (300_000, 4), (0, 4)])
def test_accumulate_zero_divides_the_batch_until_it_fits(tmp_path, monkeypatch, memory, accumulate):
    monkeypatch.setattr("transformer_vq.training.run.total_memory", lambda device: memory)
    monkeypatch.setattr(runs, "check_memory", lambda config, world: None)
    train(tiny_run(tmp_path, train={"steps": 1, "accumulate": 0}), tmp_path / "run")
    assert read_config(tmp_path / "run").train.accumulate == accumulate


def test_train_rejects_a_model_that_cannot_fit_into_memory(tmp_path):
    huge = tiny_run(tmp_path, model={"d_model": 2**20}, train={"steps": 1})
    with pytest.raises(UserError, match=r"out of memory: .* TB|out of memory: .* GB"):
        train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_init_from_starts_with_the_weights_of_another_run(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "first")
    second = replace(
        config, train=replace(config.train, init_from=str(tmp_path / "first"), steps=1)
    )
    train(second, tmp_path / "second")
    # The learning rate of the first step is zero, so only weight decay changes the weights.
    first = load_model(tmp_path / "first")[0]
    after = load_model(tmp_path / "second", "last")[0]
    decayed = 1 - config.optim.weight_decay
    assert torch.equal(after.embed.weight, first.embed.weight * decayed)
    wrong = replace(second, model=replace(second.model, n_code=9))
    with pytest.raises(CheckpointError, match=r"model\.n_code"):
        train(wrong, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_best_model_of_a_run_is_a_model_file(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    model = TransformerVQ.load(tmp_path / "run" / "best" / "model.safetensors")
    assert model.config == config.model
    assert load_model(tmp_path / "run", "3")[1] == "step 3"
    with pytest.raises(CheckpointError, match="no checkpoint '99'"):
        load_model(tmp_path / "run", "99")


class RecordingReporter:
    """Collects progress bars and messages."""

    def __init__(self):
        self.bars, self.messages = [], []

    @contextmanager
    def progress(self, what, total, unit, done=0):
        self.bars.append((what, total, unit, done))
        yield lambda n, note="": None

    def info(self, message):
        self.messages.append(message)

    def warn(self, message):
        self.messages.append(message)


@pytest.mark.parametrize("kind", [str, Path])
def test_train_and_resume_accept_str_and_path_and_report_to_the_reporter(
    tmp_path, monkeypatch, capsys, kind
):
    config, run = tiny_run(tmp_path), tmp_path / "run"
    reporter = RecordingReporter()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        stopped = train(config, kind(run), reporter=reporter)
    assert (stopped.run, stopped.step, stopped.finished) == (run, 5, False)
    assert ("run", 10, "steps", 0) in reporter.bars
    assert any(message.startswith("step 4: validation") for message in reporter.messages)
    result = resume(kind(run), reporter=reporter)
    assert (result.run, result.step, result.finished) == (run, 10, True)
    assert ("run", 10, "steps", 5) in reporter.bars
    # Nothing went to the reporter that the fixture of all tests installs.
    assert capsys.readouterr().err == ""
