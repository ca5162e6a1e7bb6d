"""Figures of training runs."""

import pytest
from helpers import tiny_run
from matplotlib.figure import Figure

from transformer_vq.errors import UserError
from transformer_vq.files import write_json
from transformer_vq.plots import (
    MIN_TOKENS,
    compare_runs,
    plot_positions,
    plot_run,
    positions,
)
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.metrics import write_rows
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


@pytest.mark.parametrize("x", ["step", "tokens", "time"])
def test_comparison_names_every_run_with_its_last_loss(tmp_path, monkeypatch, x):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    runs = [tmp_path / "a" / "base", tmp_path / "b" / "base", tmp_path / "wide"]
    all_rows = [run_rows(20 + 10 * i, 1 + i / 10) for i in range(3)]
    all_rows[2] = [row for row in all_rows[2] if row["kind"] == "train"]  # never validated
    for run, rows in zip(runs, all_rows, strict=True):
        run.mkdir(parents=True)
        write_rows(run / "metrics.jsonl", rows)
    compare_runs(runs, tmp_path / "a.png", x)
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    losses = [f"{rows[-1]['bits_per_byte']:.3f}" for rows in all_rows]
    names = [str(runs[0]), str(runs[1]), "wide"]
    assert labels == [f"{name}  {loss}" for name, loss in zip(names, losses, strict=True)]
    with pytest.raises(UserError, match="twice"):
        compare_runs([runs[0], runs[0]], tmp_path / "a.png")


def test_positions_count_steps_that_were_not_logged():
    every, some = run_rows(20, 1.0), run_rows(20, 1.0, log_every=4)
    assert positions(every, "step")[-1] == positions(some, "step")[-1] == 20
    assert positions(every, "tokens")[-1] == positions(some, "tokens")[-1] == 2000
    assert positions(every, "time")[-1] == positions(some, "time")[-1] == 20 * 0.5 + 3 * 3.0
    assert positions(every, "tokens") == sorted(positions(every, "tokens"))
