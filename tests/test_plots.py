"""Figures of training runs."""

from itertools import pairwise
from pathlib import Path

import pytest
from helpers import tiny_run
from matplotlib.figure import Figure

from transformer_vq.errors import UserError
from transformer_vq.files import write_json
from transformer_vq.plots import (
    MIN_TOKENS,
    plot_comparison,
    plot_positions,
    plot_run,
    positions,
    run_names,
)
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train

PNG = b"\x89PNG"


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_plot_run_writes_curves_and_a_figure_per_evaluation(tmp_path, attention):
    run = tmp_path / "run"
    train(tiny_run(tmp_path, model={"attention": attention}, train={"steps": 4}), run)
    assert plot_run(str(run)) == [run / "curves.png"]
    evaluation = evaluate(run, max_tokens=50).to_dict()
    write_json(run / "evaluation-test.json", evaluation)
    figures = [tmp_path / "figures" / "loss.png", run / "evaluation-test.png"]
    assert plot_run(run, figures[0]) == figures
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


def test_runs_with_the_same_name_are_named_by_their_path():
    paths = [Path("/r/a/base"), Path("/r/b/base"), Path("/r/wide")]
    assert run_names(paths) == ["/r/a/base", "/r/b/base", "wide"]
    with pytest.raises(UserError, match="twice"):
        run_names([Path("/r/a"), Path("/r/a")])
