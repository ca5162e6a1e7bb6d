"""Figures of training runs."""

import os
from pathlib import Path

import pytest
from helpers import tiny_run

from transformer_vq.errors import UserError
from transformer_vq.files import write_verified_json
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.plots import plot_run, smooth
from transformer_vq.training.run import train

PNG = b"\x89PNG"


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("kind", [str, Path])
def test_plot_run_writes_curves_and_a_figure_per_evaluation(tmp_path, attention, kind):
    run = tmp_path / "run"
    train(tiny_run(tmp_path, model={"attention": attention}, train={"steps": 4}), run)
    assert plot_run(kind(run)) == [run / "curves.png"]
    evaluation = evaluate(run, max_tokens=50).to_dict()
    write_verified_json(run / "evaluation-test.json", evaluation)
    figures = [tmp_path / "figures" / "loss.png", run / "evaluation-test.png"]
    assert plot_run(kind(run), kind(figures[0])) == figures
    for path in [run / "curves.png", *figures]:
        assert path.read_bytes().startswith(PNG)
    assert list(tmp_path.rglob(".*.partial")) == []


def test_plot_run_rejects_a_folder_without_metrics(tmp_path):
    with pytest.raises(UserError, match="has no metrics"):
        plot_run(tmp_path)


def test_plot_run_rejects_a_corrupt_evaluation(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 1}), tmp_path / "run")
    (tmp_path / "run" / "evaluation-test.json").write_text("{}")
    with pytest.raises(UserError, match=r"evaluation-test\.json .*tvq eval"):
        plot_run(tmp_path / "run")


def test_a_figure_that_cannot_be_written_leaves_the_previous_one(tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(tiny_run(tmp_path, train={"steps": 1}), run)
    plot_run(run)
    before = (run / "curves.png").read_bytes()

    def disk_full(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="disk full"):
        plot_run(run)
    assert (run / "curves.png").read_bytes() == before
    assert list(run.glob(".*.partial")) == []


def test_smooth_is_a_running_mean():
    assert smooth([3.0] * 200) == pytest.approx([3.0] * 200)
    assert smooth([1.0, 2.0]) == [1.0, 2.0]
    values = smooth([float(i % 2) for i in range(1000)])
    assert values[-1] == pytest.approx(0.5, abs=0.05)
