"""Interruptions: resuming after each signal at each kind of moment gives the same bits.

Every run is a forked child that sends the signal to itself from a hook at one exact point.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Ended, run_forked
from helpers import assert_same_runs, tiny_run
from interruptions import (
    INTERRUPTIONS,
    Interruption,
    Moment,
    before_codebooks,
    in_append,
    in_print,
    in_removal,
    in_rename,
    in_step,
    in_validation,
    sends,
)

from transformer_vq.cli.main import main
from transformer_vq.config import ModelConfig, OptimConfig, RunConfig
from transformer_vq.training.checkpoint import TrainingResult, checkpoint_steps
from transformer_vq.training.run import resume, train

# A run of 10 steps. Sequences start at steps 0, 3, 6 and 9; the state is carried through all other
# steps. Validations, of two spans, are at 2, 4, ...; checkpoints at 4, 8 and 10, of which one is
# kept. Each moment has the step of the newest checkpoint if the run can still save, and if not.
MOMENTS: dict[str, tuple[Moment, int, int]] = {
    "step, middle span": (in_step(4), 5, 4),
    "appending a train row": (in_append("train", 5), 5, 4),
    "validation": (in_validation(5), 6, 4),
    "best model, before the rename": (in_rename("best/model.safetensors", 3), 6, 4),
    "checkpoint, before the rename": (in_rename("step-00000008"), 9, 4),
    "step, first span of a sequence": (in_step(3), 4, 0),
    "step, last span": (in_step(5), 6, 4),
    "step, between weights and codebooks": (before_codebooks(6), 7, 4),
    "last step": (in_step(9), 10, 8),
    "last validation": (in_validation(9), 10, 8),
    "printing a validation": (in_print("step 6"), 6, 4),
    "appending a validation row": (in_append("validation", 6), 6, 4),
    "best model, after the rename": (in_rename("best/model.safetensors", 3, after=True), 6, 4),
    "checkpoint, before training.json": (in_rename("step-00000008.*/training.json"), 9, 4),
    "removal of an old checkpoint": (in_removal(4), 9, 8),
}
TRAIN = {"seed": 3, "batch_size": 2, "eval_every": 2, "eval_tokens": 32, "save_every": 4, "keep": 1}
N_QUICK = 5
"""Moments that the default test run covers, with one signal each."""


class Runs:
    """A folder of runs with the same config, and one of them without an interruption."""

    def __init__(self, folder: Path) -> None:
        dropout = {"p_dropsin": 0.2, "p_dropres": 0.2, "p_droplyr": 0.2}
        # Low decay, so that unused codes are revived within the few steps of these runs.
        sizes = {"d_model": 16, "n_layer": 1, "d_k": 8, "n_code": 24, "block_len": 8}
        self.config = RunConfig(
            model=ModelConfig(vocab_size=257, **sizes, **dropout, ema_decay=0.6),
            data=tiny_run(folder).data,
            # With this learning rate and seed, the validation loss rises again after step 6.
            optim=OptimConfig(lr=0.1, warmup=3, grad_clip=1.0, lr_final_share=0.05),
            train=tiny_run(folder, train=TRAIN).train,
        )
        self.folder = folder
        self.uninterrupted = folder / "uninterrupted"
        assert self.train(self.uninterrupted).status == 0

    def train(self, run: Path, *hooks: Callable[[], None]) -> Ended:
        return _in_child(lambda: train(self.config, run), *hooks)

    def resume(self, run: Path, *hooks: Callable[[], None]) -> Ended:
        return _in_child(lambda: resume(run), *hooks)

    def assert_same(self, run: Path) -> None:
        assert_same_runs(run, self.uninterrupted)


def _in_child(run: Callable[[], TrainingResult | None], *hooks: Callable[[], None]) -> Ended:
    """Run in a forked child, which exits with the same status as the command line."""

    def child() -> None:
        torch.use_deterministic_algorithms(True)
        for hook in hooks:
            hook()
        try:
            result = run()
        except KeyboardInterrupt:
            sys.exit(130)
        if result is not None and result.stopped_by is not None:
            sys.exit(128 + result.stopped_by)

    return run_forked(child, seconds=60)


def newest_step(run: Path) -> int:
    return max(checkpoint_steps(run), default=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("signals"))


def cases() -> list:
    """Return a signal that saves and one that cannot at every moment, and the others in turn."""
    listed = []
    for n, moment in enumerate(MOMENTS):
        for m, name in enumerate(
            ("SIGTERM", "SIGKILL", ("SIGINT", "SIGHUP", "Ctrl-C twice")[n % 3])
        ):
            marks = () if n < N_QUICK and m == n % 2 else pytest.mark.slow
            listed.append(pytest.param(name, moment, marks=marks, id=f"{name}-{moment}"))
    return listed


@pytest.mark.parametrize(("name", "moment"), cases())
def test_resume_after_a_signal_is_exact(runs, tmp_path, name, moment):
    run = tmp_path / "run"
    interruption, (hook, if_saved, if_not) = INTERRUPTIONS[name], MOMENTS[moment]
    ended = runs.train(run, sends(hook, interruption))
    assert ended.status == interruption.status, ended
    assert newest_step(run) == (if_saved if interruption.saves else if_not)
    assert runs.resume(run).status == 0
    runs.assert_same(run)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "SIGINT")) for name in INTERRUPTIONS],
)
def test_command_line_exits_with_the_status_of_the_signal(runs, tmp_path, name):
    run, interruption = tmp_path / "run", INTERRUPTIONS[name]
    arguments = ["train", "--config", str(runs.uninterrupted), "--out", str(run)]
    hook = sends(in_step(4), interruption)
    ended = _in_child(lambda: main(arguments), hook)
    assert (ended.status, ended.has_traceback) == (interruption.status, False), ended
    assert (f"continue with: tvq resume {run}\n" in ended.out) == interruption.saves
    assert newest_step(run) == (5 if interruption.saves else 4)
    assert _in_child(lambda: main(["resume", str(run)])).status == 0
    runs.assert_same(run)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_run_ignores_signals_that_were_ignored_before_it(runs, tmp_path, number):
    """As under nohup (SIGHUP) and in the background of a shell script (SIGINT)."""
    run = tmp_path / "run"
    hook = sends(in_step(4), Interruption((number,), status=0, saves=False))
    ended = runs.train(run, lambda: signal.signal(number, signal.SIG_IGN), hook)
    assert ended.status == 0, ended
    runs.assert_same(run)


def test_a_closed_terminal_saves_the_run(runs, tmp_path):
    """SIGHUP arrives, and every write to the terminal fails."""
    run = tmp_path / "run"

    def child() -> None:
        torch.use_deterministic_algorithms(True)
        master, slave = os.openpty()
        for number in (1, 2):
            os.dup2(slave, number)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115

        def close_terminal() -> None:
            os.close(master)
            os.kill(os.getpid(), signal.SIGHUP)

        before_codebooks(4)(close_terminal)
        train(runs.config, run)

    ended = run_forked(child)
    assert not ended.timed_out
    assert newest_step(run) == 5
    assert runs.resume(run).status == 0
    runs.assert_same(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("file", ["history.jsonl", "metrics.jsonl", "config.json"])
def test_resume_after_an_interrupted_resume_is_exact(runs, tmp_path, file, name):
    """The interruption comes while `resume` rewrites a file, before it starts to train."""
    run, interruption = tmp_path / "run", INTERRUPTIONS[name]
    assert runs.train(run, sends(in_step(5), INTERRUPTIONS["SIGKILL"])).status == -9
    assert runs.resume(run, sends(in_rename(file), interruption)).status != 0
    assert runs.resume(run).status == 0
    runs.assert_same(run)


def test_train_can_be_repeated_after_a_kill_before_the_config_is_written(runs, tmp_path):
    run = tmp_path / "run"
    hook = sends(in_rename("config.json"), INTERRUPTIONS["SIGKILL"])
    assert runs.train(run, hook).status == -9
    assert runs.train(run).status == 0
    runs.assert_same(run)
