"""Extending runs: a wsd run becomes the longer run, bit for bit; a cosine only on request."""

import os
import shutil
from dataclasses import replace

import pytest
from helpers import assert_same_runs, interrupted, losses, tiny_run

from transformer_vq.files import read_tensors
from transformer_vq.training import loop
from transformer_vq.training.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoint_steps,
    newest_checkpoint,
    read_config,
)
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import read_history, resume, train, train_or_resume

# Ten steps, of which the last four decay. The decays of longer runs start at 9 and 18; none of the
# starts is a multiple of `save_every`. Validations are at 2, 4, ...
WSD = {"optim": {"schedule": "wsd", "decay_share": 0.4, "lr": 0.02}, "model": {"n_layer": 1}}
SHORT = {"train": {"steps": 10, "save_every": 4, "eval_every": 2, "keep": 1}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with finished runs of 10, 15 and 30 steps."""
    folder = tmp_path_factory.mktemp("runs")
    config = tiny_run(folder, **WSD, **SHORT)
    for steps in (10, 15, 30):
        train(with_steps(config, steps), folder / str(steps))
    return folder


@pytest.fixture
def short(runs, tmp_path):
    """A copy of the finished run of 10 steps."""
    shutil.copytree(runs / "10", tmp_path / "run")
    return tmp_path / "run"


def with_steps(config, steps, **changes):
    return replace(config, train=replace(config.train, steps=steps, **changes))


def extend(run, steps, **options):
    return resume(run, with_steps(read_config(run), steps), **options)


def test_a_wsd_run_keeps_the_checkpoint_at_the_start_of_its_decay(runs):
    assert checkpoint_steps(runs / "10") == [6, 10]
    assert checkpoint_steps(runs / "15") == [9, 15]


def test_an_extended_run_equals_the_longer_run(runs, short, capsys):
    result = extend(short, 15)
    assert (result.step, result.finished) == (15, True)
    assert "extending from step 6 (before the decay): steps 7-10 are trained again" in (
        capsys.readouterr().err
    )
    assert_same_runs(short, runs / "15")
    extend(short, 30)
    assert_same_runs(short, runs / "30")
    got, want = (newest_checkpoint(run).metadata for run in (short, runs / "30"))
    for name in ("best_loss", "best_bits_per_byte", "validated_at"):
        assert got[name] == want[name]
    assert read_config(short).train.steps == 30


@pytest.mark.parametrize(("step", "trains_again"), [(4, False), (8, True)])
def test_a_run_stopped_before_or_during_its_decay_is_extended(
    runs, tmp_path, capsys, step, trains_again
):
    stopped = interrupted(step - 1, train, read_config(runs / "10"), tmp_path / "run")
    assert stopped.step == step
    extend(tmp_path / "run", 15)
    assert ("trained again" in capsys.readouterr().err) == trains_again
    assert_same_runs(tmp_path / "run", runs / "15")


def test_extension_restores_the_best_model_before_the_decay(short):
    """With a high learning rate in the extension, the best model stays that of the stable phase."""
    run = short
    before = read_tensors(checkpoint_folder(run, 6) / "best.safetensors")[0]
    of_decay = read_tensors(run / "best" / "model.safetensors")[0]
    assert any(not x.equal(before[name]) for name, x in of_decay.items())
    config = with_steps(read_config(run), 15, eval_every=1000)
    config = replace(config, optim=replace(config.optim, lr=5.0))
    assert resume(run, config).best_loss < losses(run)[-1][2]
    after = read_tensors(run / "best" / "model.safetensors")[0]
    assert all(x.equal(before[name]) for name, x in after.items())


class KilledError(BaseException):
    """Stands for a process that is killed."""


@pytest.mark.slow
def test_an_interrupted_extension_leaves_a_run_that_resumes(runs, tmp_path, monkeypatch):
    """Kill it before every file operation between the start of `resume` and its first step."""

    n_done = 0

    def counted(function):
        def checked(*args, **kwargs):
            nonlocal n_done
            if n_done == n:
                raise KilledError
            n_done += 1
            return function(*args, **kwargs)

        return checked

    def killed(*_):
        raise KilledError

    for n in range(20):
        run, n_done = tmp_path / str(n), 0
        shutil.copytree(runs / "10", run)
        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (shutil, "rmtree"), (os, "unlink")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(loop.TrainingLoop, "run", killed)
            with pytest.raises(KilledError):
                extend(run, 15)
        assert resume(run).finished
        assert_same_runs(run, runs / str(read_config(run).train.steps))
        if n_done < n:  # the first step was reached
            assert n > 6
            return
        extend(run, 15)
        assert_same_runs(run, runs / "15")
    pytest.fail("the extension did not reach the training loop")


@pytest.mark.parametrize("damage", ["missing", "best.safetensors"])
def test_extension_needs_the_checkpoint_at_the_start_of_the_decay(short, damage):
    folder = checkpoint_folder(short, 6)
    if damage == "missing":
        shutil.rmtree(folder)
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cannot be extended without its checkpoint.*step 6"):
        extend(short, 15)
    assert checkpoint_steps(short)[-1] == 10
    assert extend(short, 15, allow_schedule_change=True).finished


def test_fewer_steps_than_done_are_rejected(short):
    with pytest.raises(CheckpointError, match="already completed 10 steps"):
        extend(short, 9)


def test_a_run_is_shortened_if_the_earlier_decay_has_not_passed(runs, tmp_path):
    for stop in (6, 7):
        interrupted(stop - 1, train, read_config(runs / "15"), tmp_path / str(stop))
    extend(tmp_path / "6", 10)
    assert losses(tmp_path / "6") == losses(runs / "10")
    with pytest.raises(CheckpointError, match=r"decay would start at step 6.*completed 7 steps"):
        extend(tmp_path / "7", 10)


def test_a_cosine_is_stretched_on_request_only(tmp_path, capsys):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"cosine .*--allow-schedule-change.*init-from"):
        extend(tmp_path / "run", 20)
    assert read_config(tmp_path / "run").train.steps == 10
    assert extend(tmp_path / "run", 20, allow_schedule_change=True).step == 20
    assert "learning rate at step 10: 0.0001 -> " in capsys.readouterr().err
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[10]["lr"] > rows[9]["lr"]
    events = [(row["event"], row["step"]) for row in read_history(tmp_path / "run")]
    assert events == [("start", 0), ("finish", 10), ("extend", 10), ("finish", 20)]


def test_train_or_resume_does_not_change_a_run(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    stored = read_config(tmp_path / "run")
    other = replace(stored, optim=replace(stored.optim, lr=1.0))
    with pytest.raises(CheckpointError, match=r"optim\.lr"):
        train_or_resume(other, tmp_path / "run")
