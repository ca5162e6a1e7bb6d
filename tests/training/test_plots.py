"""Figures of training runs."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import tiny_run
from matplotlib.figure import Figure

from transformer_vq.errors import UserError
from transformer_vq.files import write_json
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.plots import (
    MIN_TOKENS,
    compare_runs,
    plot_comparison,
    plot_curves,
    plot_positions,
    plot_run,
    positions,
    run_names,
    smooth,
)
from transformer_vq.training.run import train

PNG = b"\x89PNG"


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("kind", [str, Path])
def test_plot_run_writes_curves_and_a_figure_per_evaluation(tmp_path, attention, kind):
    run = tmp_path / "run"
    train(tiny_run(tmp_path, model={"attention": attention}, train={"steps": 4}), run)
    assert plot_run(kind(run)) == [run / "curves.png"]
    evaluation = evaluate(run, max_tokens=50).to_dict()
    write_json(run / "evaluation-test.json", evaluation)
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


def test_positions_with_few_tokens_are_left_out(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    tokens = [1, MIN_TOKENS - 1, MIN_TOKENS, 5000]
    bins = [
        {"first": 2**i - 1, "last": 2 ** (i + 1) - 2, "tokens": n, "nats_per_token": 1.0}
        for i, n in enumerate(tokens)
    ]
    result = {"by_position": bins, "bits_per_byte": 1.5}
    plot_positions({"split": "test", "protocols": {"streaming": result}}, tmp_path / "a.png")
    (line,) = figures[0].axes[0].lines
    assert len(line.get_xdata()) == 2
    assert "2 with fewer than 100 tokens" in figures[0].get_supxlabel()


def test_curves_explain_the_thin_line_in_a_note(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    rows = [{"kind": "train", "step": i, "bits_per_byte": 8.0 / i} for i in range(1, 9)]
    rows.append({"kind": "validation", "step": 8, "bits_per_byte": 1.0})
    plot_curves({"run": rows}, tmp_path / "a.png")
    left, _ = figures[0].axes
    assert left.get_title(loc="left") == "Loss (bits per byte)"
    assert [text.get_text() for text in left.texts] == ["validation\n1.000"]
    note = figures[0].get_supxlabel()
    assert note.startswith("Thin line: training loss")
    assert "above 1.2 are cut off" in note
    assert left.get_ylim()[1] == pytest.approx(1.25)


def run_rows(n_steps, loss, log_every=1):
    """Return the rows of a run that is validated every ten steps, starting with the first."""
    rows = []
    for step in range(n_steps + 1):
        bits = loss + 4 / (1 + step)
        if step and step % log_every == 0:
            row = {"kind": "train", "step": step, "bits_per_byte": bits}
            rows.append(row | {"tokens": 100, "seconds": 0.5})
        if step % 10 == 0:
            rows.append({"kind": "validation", "step": step, "bits_per_byte": bits, "seconds": 3.0})
    return rows


def test_comparison_labels_every_run_at_the_right(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    runs = {f"run-{i}": run_rows(20 + 10 * i, 1 + i / 10) for i in range(8)}
    plot_comparison(runs, tmp_path / "a.png")
    (axes,) = figures[0].axes
    labels = [text.get_text() for text in axes.texts]
    assert labels == [f"{name}  {rows[-1]['bits_per_byte']:.3f}" for name, rows in runs.items()]
    assert {text.xy[0] for text in axes.texts} == {90}
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    for low, high in pairwise(boxes):
        assert low.y1 <= high.y0 + 1
    assert len({text.get_color() for text in axes.texts}) == 8


def test_comparison_of_runs_without_validation_shows_the_training_loss(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    rows = [row for row in run_rows(5, 1.0) if row["kind"] == "train"]
    plot_comparison(
        {"a": rows, "a name that is far too long to be shown": rows}, tmp_path / "a.png"
    )
    short, long = (text.get_text() for text in figures[0].axes[0].texts)
    assert short == f"a  {rows[-1]['bits_per_byte']:.3f}"
    assert long.startswith("...")
    assert len(long) < 35


def test_positions_count_steps_that_were_not_logged():
    every, some = run_rows(20, 1.0), run_rows(20, 1.0, log_every=4)
    assert positions(every, "step")[-1] == positions(some, "step")[-1] == 20
    assert positions(every, "tokens")[-1] == positions(some, "tokens")[-1] == 2000
    assert positions(every, "time")[-1] == positions(some, "time")[-1] == 20 * 0.5 + 3 * 3.0
    assert positions(every, "tokens") == sorted(positions(every, "tokens"))


def test_run_names_are_disambiguated_by_parent_folders():
    paths = [Path("/r/a/base"), Path("/r/b/base"), Path("/r/wide"), Path("/q/b/base")]
    assert run_names(paths) == ["a/base", "r/b/base", "wide", "q/b/base"]
    with pytest.raises(UserError, match="twice"):
        run_names([Path("/r/a"), Path("/r/a")])


def test_comparison_rejects_a_run_without_metrics(tmp_path):
    with pytest.raises(UserError, match=r"empty has no metrics"):
        compare_runs([tmp_path / "empty", tmp_path / "other"], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
