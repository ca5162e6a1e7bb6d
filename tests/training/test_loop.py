"""Runs: what they leave on disk, exact resume, stopping, and what goes wrong."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import tiny_run

from transformer_vq import TransformerVQ, files
from transformer_vq.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoint_steps,
    load_model,
    locked,
    read_config,
)
from transformer_vq.files import write_json
from transformer_vq.training import loop, runs
from transformer_vq.training.loop import TrainingError
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.runs import resume, train
from transformer_vq.training.step import Trainer


def losses(run):
    """(kind, step, loss) of every row: what must not depend on interruptions."""
    return [(row["kind"], row["step"], row["nats_per_token"]) for row in read_metrics(run)]


def interrupt_after(monkeypatch, n, number=signal.SIGINT):
    """Send a signal to this process while update n is at work."""
    update = Trainer.update

    def and_signal(self, batch, step, begins):
        if step == n:
            os.kill(os.getpid(), number)
        return update(self, batch, step, begins)

    monkeypatch.setattr(Trainer, "update", and_signal)


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
    health, update = loop._health, loop.Sitting._update

    def counted(seen):
        steps.append(len(notes) + 1)
        return health(seen)

    def noted(self, log):
        notes.append(update(self, log))
        return notes[-1]

    monkeypatch.setattr(loop, "_health", counted)
    monkeypatch.setattr(loop.Sitting, "_update", noted)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resuming_twice_gives_the_same_losses(tmp_path, monkeypatch, number):
    config = tiny_run(tmp_path, model={"p_droplyr": 0.3})
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1, number)
        result = train(config, tmp_path / "cut")
    assert (result.step, result.finished, result.stopped_by) == (2, False, number)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6, number)
        assert resume(tmp_path / "cut").step == 7
    assert resume(tmp_path / "cut").finished
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole = load_model(tmp_path / "whole", "last")[0].state_dict()
    for name, x in load_model(tmp_path / "cut", "last")[0].state_dict().items():
        assert torch.equal(x, whole[name]), name


def test_a_signal_during_validation_does_not_wait_for_it_and_loses_nothing(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    evaluate = loop.evaluate

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", signalled)
        result = train(config, tmp_path / "cut")
    assert (result.step, result.finished) == (4, False)
    assert all(kind == "train" for kind, _, _ in losses(tmp_path / "cut"))
    assert resume(tmp_path / "cut").finished
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [{"optim": {"optimizer": "adafactor"}}, {"model": {"attention": "full"}}, {}],
)
def test_other_optimizers_and_full_attention_resume_exactly_too(tmp_path, monkeypatch, changes):
    config = tiny_run(tmp_path, **changes, train={"accumulate": 2, "batch_size": 2})
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        train(config, tmp_path / "cut")
    resume(tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_killed_at_a_random_moment_and_resumed_twice(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 60, "save_every": 7, "eval_every": 10})
    train(config, tmp_path / "whole")
    run = tmp_path / "killed"
    program = (
        "import json, sys; from pathlib import Path; import torch\n"
        "from transformer_vq.config import RunConfig\n"
        "from transformer_vq.training.runs import resume, train\n"
        "torch.use_deterministic_algorithms(True)\n"
        "run = Path(sys.argv[1])\n"
        "if (run / 'config.json').exists(): resume(run)\n"
        "else: train(RunConfig.from_dict(json.loads(sys.argv[2])), run)\n"
    )
    command = [sys.executable, "-c", program, str(run), json.dumps(config.to_dict())]
    generator = random.Random(int.from_bytes(os.urandom(4)))
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        seen = len(read_metrics(run)) if run.exists() else 0
        deadline = time.monotonic() + 60
        while len(read_metrics(run)) < seen + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.3)
        process.kill()
        process.wait()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    assert losses(run) == losses(tmp_path / "whole")


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
    assert "damaged" in capsys.readouterr().err
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
    with pytest.raises(CheckpointError, match="none of them can be read"):
        resume(tmp_path / "run")


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    run = tmp_path / "begun"
    run.mkdir()
    write_json(run / "config.json", config.to_dict())
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "nats_per_token": 9.0}\n{"ki')
    assert resume(run).finished
    assert losses(run) == losses(tmp_path / "whole")


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
        with pytest.raises(TrainingError, match=r"cannot save step 10.*step 3 is still there"):
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
    with pytest.raises(TrainingError, match=r"update 8 is not finite.*step 6 is good"):
        train(tiny_run(tmp_path), tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [3, 6]
    state = load_model(tmp_path / "run", "last")[0].state_dict()
    assert all(x.isfinite().all() for x in state.values())


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="tvq resume"):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_resume_with_another_config_names_what_differs(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    other = replace(
        config, model=replace(config.model, n_code=9), optim=replace(config.optim, lr=1.0)
    )
    with pytest.raises(
        CheckpointError, match=r"model.n_code \(7 -> 9\), optim.lr \(0.001 -> 1.0\)"
    ):
        resume(tmp_path / "run", other)
    # A config.json that was changed by hand is found out by the checkpoint.
    write_json(tmp_path / "run" / "config.json", other.to_dict())
    with pytest.raises(CheckpointError, match=r"model\.n_code"):
        resume(tmp_path / "run")


def test_what_no_update_depends_on_may_change(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        train(config, tmp_path / "run")
    resume(tmp_path / "run", replace(config, train=replace(config.train, keep=1, recompute=True)))
    assert checkpoint_steps(tmp_path / "run") == [10]
    assert read_config(tmp_path / "run").train.keep == 1


def test_changed_data_are_noticed(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    (Path(config.data.path) / "0.txt").write_text("other words " * 200)
    with pytest.raises(CheckpointError, match=r"data of .* have changed"):
        resume(tmp_path / "run")


def test_data_that_were_only_copied_have_not_changed(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        train(config, tmp_path / "run")
    shutil.copytree(config.data.path, tmp_path / "copy", copy_function=shutil.copyfile)
    moved = replace(config, data=replace(config.data, path=str(tmp_path / "copy")))
    assert resume(tmp_path / "run", moved).finished


def test_a_run_can_be_resumed_from_another_folder(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = replace(config, data=replace(config.data, path="text"))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        train(relative, Path("run"))
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run").finished


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


@pytest.mark.parametrize(("memory", "parts"), [(1 << 40, 1), (300_000, 4), (0, 4)])
def test_the_batch_is_divided_until_it_fits(tmp_path, monkeypatch, memory, parts):
    monkeypatch.setattr(runs, "total_memory", lambda device: memory)
    train(tiny_run(tmp_path, train={"steps": 1, "accumulate": 0}), tmp_path / "run")
    assert read_config(tmp_path / "run").train.accumulate == parts


def test_one_process_at_a_time(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(CheckpointError, match="another process"):
        resume(tmp_path / "run")


def test_a_finished_run_resumes_to_nothing(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    before = losses(tmp_path / "run")
    assert resume(tmp_path / "run").finished
    assert losses(tmp_path / "run") == before


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


def test_tensorboard_gets_the_same_numbers(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3, "tensorboard": True}), tmp_path / "run")
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/nats_per_token" in files[0].read_bytes()


def test_the_model_of_a_run_loads_as_any_model(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    model = TransformerVQ.load(tmp_path / "run" / "best" / "model.safetensors")
    assert model.config == config.model
    assert load_model(tmp_path / "run", "3")[1] == "step 3"
    with pytest.raises(CheckpointError, match="no checkpoint '99'"):
        load_model(tmp_path / "run", "99")
