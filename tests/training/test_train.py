"""Training runs: the files they write, their metrics, and invalid requests."""

import math
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from helpers import interrupted, losses, tiny_run

from transformer_vq.data.prepare import prepare
from transformer_vq.errors import UserError
from transformer_vq.training import run as runs
from transformer_vq.training.checkpoint import (
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


def test_wandb_receives_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := MagicMock())
    train(tiny_run(tmp_path, train={"steps": 2, "wandb": "mine"}), tmp_path / "run")
    assert wandb.init.call_args.kwargs["project"] == "mine"
    run = wandb.init.return_value
    logged = [call.args[0]["train/nats_per_token"] for call in run.log.call_args_list[:2]]
    assert logged == [loss for kind, _, loss in losses(tmp_path / "run") if kind == "train"]
    run.finish.assert_called_once_with()


def test_tensorboard_receives_the_same_values(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 3, "tensorboard": True}), tmp_path / "run")
    files = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/nats_per_token" in files[0].read_bytes()


@pytest.mark.parametrize(("memory", "accumulate"), [(1 << 40, 1), (300_000, 4), (0, 4)])
def test_accumulate_zero_divides_the_batch_until_it_fits(tmp_path, monkeypatch, memory, accumulate):
    monkeypatch.setattr("transformer_vq.sizes.total_memory", lambda device: memory)
    monkeypatch.setattr(runs, "check_memory", lambda config, world: None)
    train(tiny_run(tmp_path, train={"steps": 1, "accumulate": 0}), tmp_path / "run")
    assert read_config(tmp_path / "run").train.accumulate == accumulate


def test_train_rejects_a_model_that_cannot_fit_into_memory(tmp_path):
    huge = tiny_run(tmp_path, model={"d_model": 2**20}, train={"steps": 1})
    with pytest.raises(UserError, match=r"out of memory: .* TB|out of memory: .* GB"):
        train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [str, Path])
def test_train_and_resume_accept_str_and_path_and_report_to_the_reporter(tmp_path, capsys, kind):
    config, run = tiny_run(tmp_path), tmp_path / "run"
    reporter = MagicMock()
    stopped = interrupted(4, train, config, kind(run), reporter=reporter)
    assert (stopped.run, stopped.step, stopped.finished) == (run, 5, False)
    assert call("run", 10, "steps", 0) in reporter.progress.mock_calls
    messages = [x.args[0] for x in reporter.info.mock_calls]
    assert any(message.startswith("step 4: validation") for message in messages)
    result = resume(kind(run), reporter=reporter)
    assert (result.run, result.step, result.finished) == (run, 10, True)
    assert call("run", 10, "steps", 5) in reporter.progress.mock_calls
    # Nothing went to the reporter that the fixture of all tests installs.
    assert capsys.readouterr().err == ""
