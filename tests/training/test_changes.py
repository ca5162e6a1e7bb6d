"""Settings that change when a run is resumed, and the history that records them."""

from dataclasses import replace

import pytest
from helpers import assert_close, interrupted, losses, tiny_run

from transformer_vq.training.checkpoint import load_model, read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import read_history, resume, train

NO_DROPOUT = {"p_dropsin": 0.0, "p_dropres": 0.0, "p_droplyr": 0.0}


@pytest.fixture
def stopped(tmp_path):
    """A run without dropout that was stopped after four steps, within its sequences."""
    config = tiny_run(tmp_path, model=NO_DROPOUT, train={"accumulate": 2})
    interrupted(3, train, config, tmp_path / "run")
    return tmp_path / "run"


def changed(run, **sections):
    config = read_config(run)
    parts = {name: replace(getattr(config, name), **x) for name, x in sections.items()}
    return replace(config, **parts)


def test_a_new_learning_rate_applies_from_the_resumed_step_on_and_is_recorded(stopped):
    before = losses(stopped)
    assert resume(stopped, changed(stopped, optim={"lr": 5e-3})).finished
    assert losses(stopped)[: len(before)] == before
    rates = [row["lr"] for row in read_metrics(stopped) if row["kind"] == "train"]
    assert rates[3] == 1e-3
    assert rates[4] > 4e-3
    rows = read_history(stopped)
    assert [(row["event"], row["step"]) for row in rows] == [
        *(("start", 0), ("stop", 4), ("resume", 4), ("finish", 10))
    ]
    assert [row["changed"] for row in rows] == [{}, {}, {"optim.lr": [1e-3, 5e-3]}, {}]
    assert resume(stopped).finished  # checkpoints of both configs belong to the run
    assert load_model(stopped, "last")[1] == "step 10"
    assert len(read_history(stopped)) == 4  # a finished run is left unchanged


def test_another_number_of_micro_batches_gives_the_same_losses_up_to_rounding(stopped, tmp_path):
    train(read_config(stopped), tmp_path / "uninterrupted")
    resume(stopped, changed(stopped, train={"accumulate": 4}))
    assert read_config(stopped).train.accumulate == 4
    got, want = losses(stopped), losses(tmp_path / "uninterrupted")
    assert [row[:2] for row in got] == [row[:2] for row in want]
    assert [row[2] for row in got] == pytest.approx([row[2] for row in want], rel=1e-5)
    models = [load_model(run, "last")[0] for run in (stopped, tmp_path / "uninterrupted")]
    assert_close("embeddings", models[0].embed.weight, models[1].embed.weight, 1e-4)


def test_micro_batches_with_dropout_are_resplit(tmp_path):
    config, run = tiny_run(tmp_path, model={"p_dropsin": 0.5, "p_droplyr": 0.5}), tmp_path / "run"
    interrupted(3, train, config, run)
    for accumulate, last in ((4, 5), (2, 7), (1, 9)):
        config = changed(run, train={"accumulate": accumulate})
        assert interrupted(last - 1, resume, run, config).step == last
    assert resume(run).finished


def test_accumulate_zero_chooses_again(stopped):
    resume(stopped, changed(stopped, train={"accumulate": 0}))
    assert read_config(stopped).train.accumulate == 1
    assert read_history(stopped)[2]["changed"] == {"train.accumulate": [2, 1]}


def test_the_precision_changes_within_a_sequence(stopped, tmp_path):
    train(read_config(stopped), tmp_path / "uninterrupted")
    assert interrupted(6, resume, stopped, changed(stopped, train={"precision": "bf16"})).step == 7
    assert resume(stopped, changed(stopped, train={"precision": "fp32"})).finished
    got, want = losses(stopped), losses(tmp_path / "uninterrupted")
    assert [row[2] for row in got] == pytest.approx([row[2] for row in want], rel=0.03)
    values = [row["changed"] for row in read_history(stopped) if row["event"] == "resume"]
    assert values == [{"train.precision": ["fp32", "bf16"]}, {"train.precision": ["bf16", "fp32"]}]


def test_history_survives_a_corrupt_or_unfinished_line(stopped, capsys):
    path = stopped / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace("start", "", 1)[:-9] + "\n" + lines[1] + '{"unfinished')
    resume(stopped)
    assert [row["event"] for row in read_history(stopped)] == ["stop", "resume", "finish"]
    assert "history.jsonl: skipped 1 of 2 lines" in capsys.readouterr().err
