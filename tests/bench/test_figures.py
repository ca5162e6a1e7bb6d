"""Figures of recorded benchmarks: labels, marks of failed measurements, and the files in docs/."""

import importlib.util
import json
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from transformer_vq.bench.plots import plot_decode, plot_path, plot_record
from transformer_vq.bench.step_plots import plot_time_per_token
from transformer_vq.training.plot_style import label_end, new_figure

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS, ASSETS = ROOT / "benchmarks", ROOT / "docs" / "assets"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    figures = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def record(name):
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def texts(axes):
    return [text.get_text() for text in axes.texts]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ASSETS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scaling_names_the_lines_and_the_length_that_was_skipped(drawn, tmp_path):
    plot_record(record("scaling"), tmp_path / "figure.png")
    left, right = drawn[0].axes
    assert texts(left) == ["full attention", "Transformer-VQ"]
    assert texts(right) == ["full attention\nskipped: too slow\nfrom 32,768", "Transformer-VQ"]
    note = drawn[0].get_supxlabel()
    assert "estimated" in note
    assert "All steps use activation checkpointing" in note


def test_time_per_token_marks_skipped_lengths_at_their_estimates(drawn, tmp_path):
    rows = record("scaling")["rows"]
    plot_time_per_token(record("scaling"), tmp_path / "figure.png")
    (axes,) = drawn[0].axes
    (estimates,) = (line for line in axes.lines if line.get_markerfacecolor() == "white")
    want = [1e6 * r["estimated_seconds"] / r["seq_len"] for r in rows if "failed" in r]
    assert list(estimates.get_xdata()) == [32768, 131072]
    assert list(estimates.get_ydata()) == pytest.approx(want)
    assert "skipped: about\n126 s per step" in texts(axes)


def test_length_without_memory_is_named_at_the_end_of_its_line(drawn, tmp_path):
    plot_record(record("train-long-heads"), tmp_path / "figure.png")
    for axes in drawn[0].axes:
        assert "Transformer-VQ, MHA\nout of memory\nfrom 131,072" in texts(axes)
        assert "Transformer-VQ, MQA" in texts(axes)


def test_stars_mark_activation_checkpointing_if_only_some_steps_use_it(drawn, tmp_path):
    plot_record(record("train-bf16-32k"), tmp_path / "figure.png")
    for axes in drawn[0].axes:
        stars = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "*"]
        assert stars == [[32768]]
    assert "Star: activation checkpointing" in drawn[0].get_supxlabel()


def test_star_marks_a_line_whose_steps_all_use_activation_checkpointing(drawn, tmp_path):
    values = record("train-bf16-32k")
    values["rows"] += record("train-bf16-32k-recomputed")["rows"]
    values["rows"] = [
        row for row in values["rows"] if row["checkpoint_activations"] or row["seq_len"] == 2048
    ]
    for row in values["rows"]:
        row["checkpoint_activations"] = row["attention"] == "full"
    plot_record(values, tmp_path / "figure.png")
    stars = [line for line in drawn[0].axes[0].lines if line.get_marker() == "*"]
    assert [list(line.get_xdata()) for line in stars] == [[2048, 32768]]


def test_figure_with_many_lines_has_one_legend_entry_per_line(drawn, tmp_path):
    plot_record(record("train-bf16"), tmp_path / "figure.png")
    (legend,) = drawn[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == len(set(names)) == 7
    assert "PyTorch SDPA, MHA" in names
    assert not texts(drawn[0].axes[0])


def test_decoding_lines_differ_in_colour_or_dashes_and_none_is_drawn_twice(drawn, tmp_path):
    plot_record(record("decode"), tmp_path / "figure.png")
    assert len(drawn[0].axes) == 4  # speed and state for two batch sizes
    for axes in drawn[0].axes:
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        looks = [(line.get_color(), line.get_linestyle()) for line in lines]
        assert len(set(looks)) == len(looks)
        for a, b in combinations(lines, 2):
            assert list(a.get_ydata()) != list(b.get_ydata())
    assert "full attention\nout of memory\nat 65,536" in texts(drawn[0].axes[2])


def test_decoding_can_be_limited_to_one_batch_size(drawn, tmp_path):
    plot_decode(record("decode"), tmp_path / "figure.png", batches=[1])
    speed, _ = drawn[0].axes
    assert "full attention\nout of memory\nat 524,288" in texts(speed)
    assert "Transformer-VQ,\ncompiled" in texts(speed)


def test_runs_are_named_by_their_attention_if_it_differs(drawn, tmp_path):
    values = record("small")
    plot_record(values, tmp_path / "figure.png")
    assert texts(drawn[0].axes[0]) == ["Transformer-VQ\n2.004", "full attention\n1.993"]
    values["runs"]["small-full"]["config"]["model"]["attention"] = "vq"
    plot_record(values, tmp_path / "figure.png")
    assert texts(drawn[1].axes[0]) == ["small-vq\n2.004", "small-full\n1.993"]


def test_labels_at_line_ends_do_not_overlap(drawn, tmp_path):
    with new_figure(tmp_path / "figure.png") as (_, (axes,)):
        for i in range(5):
            line = [0, 1], [0, 1 + i / 100]
            axes.plot(*line)
            label_end(axes, line, f"line {i}", "black")
    boxes = [text.get_window_extent() for text in drawn[0].axes[0].texts]
    for low, high in pairwise(boxes):
        assert low.y1 <= high.y0 + 1


def test_new_figure_keeps_global_settings_and_writes_nothing_on_error(tmp_path):
    before = dict(matplotlib.rcParams)
    with pytest.raises(KeyError), new_figure(tmp_path / "new" / "figure.png"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with new_figure(tmp_path / "new" / "figure.png"):
        pass
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["documents", "train-quick", "train-bf16-32k-recomputed"])
def test_records_without_a_committed_figure_can_be_plotted(name, tmp_path):
    assert plot_path(BENCHMARKS / f"{name}.json", tmp_path / "a.png") == [tmp_path / "a.png"]


def test_committed_diagram_is_what_its_script_draws():
    assert (ASSETS / "idea.svg").read_text() == script("idea").draw()


def test_figures_script_covers_every_committed_figure():
    assert sorted(script("figures").RECORDS) == sorted(p.stem for p in BENCHMARKS.glob("*.png"))
    for name in ("decode", "time-per-token"):
        assert (ASSETS / f"{name}.png").read_bytes().startswith(b"\x89PNG")
