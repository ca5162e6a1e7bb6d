"""Resuming: exactly where a run was stopped or killed, and only as the same run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import interrupt_after, losses, tiny_run

from transformer_vq import TransformerVQ
from transformer_vq.data.corpus import prepare
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.evaluation import score
from transformer_vq.files import write_json
from transformer_vq.training import loop
from transformer_vq.training import run as runs
from transformer_vq.training.checkpoint import (
    CheckpointError,
    checkpoint_steps,
    load_model,
    locked,
    read_config,
    write_config,
)
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import resume, train


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
    score = loop.score

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return score(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "score", signalled)
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


def test_killed_at_a_random_moment_and_resumed(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 40, "save_every": 5, "eval_every": 10})
    train(config, tmp_path / "whole")
    run = tmp_path / "killed"
    program = (
        "import json, sys; from pathlib import Path; import torch\n"
        "from transformer_vq.config import RunConfig\n"
        "from transformer_vq.training.run import resume, train\n"
        "torch.use_deterministic_algorithms(True)\n"
        "run = Path(sys.argv[1])\n"
        "if (run / 'config.json').exists(): resume(run)\n"
        "else: train(RunConfig.from_dict(json.loads(sys.argv[2])), run)\n"
    )
    command = [sys.executable, "-c", program, str(run), json.dumps(config.to_dict())]
    generator = random.Random(int.from_bytes(os.urandom(4)))
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while len(read_metrics(run)) < 3 and process.poll() is None:
        time.sleep(0.01)
    time.sleep(generator.random() * 0.1)
    process.kill()
    process.wait()
    assert resume(run).finished
    assert losses(run) == losses(tmp_path / "whole")


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    config = tiny_run(tmp_path)
    train(config, tmp_path / "whole")
    run = tmp_path / "begun"
    run.mkdir()
    write_config(run, config, ByteTokenizer())
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "nats_per_token": 9.0}\n{"ki')
    assert resume(run).finished
    assert losses(run) == losses(tmp_path / "whole")


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
    # Also if config.json itself says so, as if copied from another run.
    write_config(tmp_path / "run", other, ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"model\.n_code"):
        resume(tmp_path / "run")


def test_a_config_edited_by_hand_or_of_an_older_version_is_rejected(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 3})
    train(config, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    write_json(path, values | {"train": values["train"] | {"seed": 1}})
    with pytest.raises(CheckpointError, match="was edited"):
        resume(tmp_path / "run")
    write_json(path, config.to_dict())
    with pytest.raises(CheckpointError, match="another version"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("option", ["eval_every", "eval_tokens", "log_every", "save_every"])
def test_how_often_a_run_is_looked_at_changes_no_loss(tmp_path, option):
    """Codes are started from keys and revived, so candidates are chosen at every step."""
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


def test_evaluation_draws_no_random_number(tmp_path):
    config = tiny_run(tmp_path, model={"codebook_init": "keys", "revive_below": 0.5})
    model = TransformerVQ(config.model).train()
    before = torch.get_rng_state()
    score(model, prepare(config.data).split("validation"), seq_len=48, window=16)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_appears_while_another_prepares_is_not_overwritten(tmp_path, monkeypatch):
    """Both have looked before either wrote; the second look is under the lock."""
    config = tiny_run(tmp_path, train={"steps": 3})
    prepare_corpus = runs._corpus

    def while_another_starts(*arguments):
        corpus = prepare_corpus(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "_corpus", prepare_corpus)
            train(config, tmp_path / "run")
        return corpus

    monkeypatch.setattr(runs, "_corpus", while_another_starts)
    with pytest.raises(CheckpointError, match="already contains a run"):
        train(replace(config, train=replace(config.train, seed=5)), tmp_path / "run")
    assert read_config(tmp_path / "run").train.seed == 0
    assert load_model(tmp_path / "run", "last")[1] == "step 3"


def test_a_damaged_line_of_the_metrics_is_reported_and_all_others_stay(tmp_path, capsys):
    train(tiny_run(tmp_path, train={"steps": 4}), tmp_path / "run")
    path, before = tmp_path / "run" / "metrics.jsonl", losses(tmp_path / "run")
    lines = path.read_text().splitlines(keepends=True)
    for damage in ("{", "null\n", "[" * 100_000 + "\n", lines[1].replace("1", "2", 1), "\xff\n"):
        path.write_text("".join([lines[0], damage, *lines[2:]]))
        capsys.readouterr()
        if damage.endswith("\n"):
            assert losses(tmp_path / "run") == [before[0], *before[2:]]
            assert "1 of" in capsys.readouterr().err
        else:  # it has swallowed the next line too
            assert losses(tmp_path / "run") == [before[0], *before[3:]]
            assert "line 2" in capsys.readouterr().err
    path.write_text("".join(lines)[:-5])  # cut off by a crash: nothing to report
    assert losses(tmp_path / "run") == before[:-1]
    assert capsys.readouterr().err == ""


def test_what_no_update_depends_on_may_change(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        train(config, tmp_path / "run")
    resume(
        tmp_path / "run",
        replace(config, train=replace(config.train, keep=1, checkpoint_activations=True)),
    )
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
