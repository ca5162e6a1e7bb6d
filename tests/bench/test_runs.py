"""Benchmarks that use runs: the demo, the comparison of runs, and figures."""

import json

import pytest
from helpers import tiny_run

from transformer_vq.bench import compare, demo, equality
from transformer_vq.bench.plots import plot_path
from transformer_vq.cli.bench import demo as demo_command
from transformer_vq.cli.main import main
from transformer_vq.errors import UserError
from transformer_vq.files import write_verified_json
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train


def test_equality_is_one_line_with_the_largest_differences():
    rows = [("shga", "serial", 4e-16, 1e-15), ("mha", "auto", 5e-16, 9e-16)]
    line = equality.differences_line(rows)
    assert line.startswith("2 combinations of heads and reductions equal Definition 3.1")
    assert "5e-16 (outputs), 1e-15 (gradients)" in line
    assert "\n" not in line
    assert "equal" not in equality.differences_line([*rows, ("mqa", "auto", 1e-3, 1e-15)])
    assert "| mha | auto | 5.0e-16 | 9.0e-16 |" in equality.differences_table(rows)


@pytest.mark.slow
def test_demo_prints_three_figures_and_does_not_train_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_command, "PRESETS", {"tiny": tiny_run(tmp_path)})
    monkeypatch.setattr(equality, "differences", lambda: [("shga", "serial", 1e-16, 1e-15)])
    out = tmp_path / "demo"
    main(["bench", "demo", "--out", str(out)])
    printed = capsys.readouterr().out
    for row in ("order 0", "order 2", "Transformer-VQ"):
        assert f"| {row}" in printed
    assert demo.PROMPT in printed
    assert "| shga | serial |" not in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    main(["bench", "demo", "--out", str(out)])  # the run is finished
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "demo", "--out", str(out), "--steps", "1"])
    assert stopped.value.code == 2
    assert "--train.steps" in capsys.readouterr().err


def test_compare_writes_a_record_of_two_runs_that_can_be_plotted(tmp_path):
    names = {"vq": {}, "full": {"model": {"attention": "full"}}}
    for name, changes in names.items():
        train(tiny_run(tmp_path, **changes), tmp_path / name)
        values = evaluate(tmp_path / name).to_dict()
        write_verified_json(tmp_path / name / "evaluation-test.json", values)
    path = tmp_path / "record.json"
    main(["bench", "compare", str(tmp_path / "vq"), str(tmp_path / "full"), "--out", str(path)])
    result = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    table = compare.table(result)
    bits = result["runs"]["vq"]["evaluation"]["protocols"]["streaming"]["bits_per_byte"]
    assert f"| {bits:.4f} |" in table
    assert table.splitlines()[-1].endswith("|  |")  # no streaming evaluation of full attention
    assert plot_path(path) == [path.with_suffix(".png")]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_compare_rejects_a_run_without_evaluation(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 1}), tmp_path / "run")
    with pytest.raises(UserError, match="tvq eval"):
        compare.record([tmp_path / "run"])


@pytest.mark.parametrize("content", ["", "{}", "[]", "\x00"])
def test_plot_rejects_a_file_without_measurements(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"file\.json"):
        plot_path(path)
