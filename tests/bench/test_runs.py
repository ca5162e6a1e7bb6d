"""What is made of runs: the demo, the record of several, their figures."""

import json

import pytest
from helpers import tiny_run

from transformer_vq.bench import compare, demo
from transformer_vq.bench.plots import plot_path, smooth
from transformer_vq.errors import UserError
from transformer_vq.files import write_verified_json
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train


def test_the_demo_prints_three_figures_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "PRESETS", {"tiny": tiny_run(tmp_path)})
    monkeypatch.setattr(demo, "differences", lambda: [("shga", "serial", 1e-16, 1e-15)])
    out = tmp_path / "demo"
    demo.main(["--out", str(out)])
    printed = capsys.readouterr().out
    for row in ("order 0", "order 2", "Transformer-VQ"):
        assert f"| {row}" in printed
    assert demo.PROMPT in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    demo.main(["--out", str(out)])  # a second time: nothing is trained again
    assert capsys.readouterr().out == printed


def test_a_record_of_two_runs_and_its_figure(tmp_path):
    names = {"vq": {}, "full": {"model": {"attention": "full"}}}
    for name, changes in names.items():
        train(tiny_run(tmp_path, **changes), tmp_path / name)
        facts = evaluate(tmp_path / name).to_dict()
        write_verified_json(tmp_path / name / "evaluation-test.json", facts)
    path = tmp_path / "record.json"
    compare.main([str(tmp_path / "vq"), str(tmp_path / "full"), "--out", str(path)])
    result = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    table = compare.table(result)
    bits = result["runs"]["vq"]["evaluation"]["protocols"]["streaming"]["bits_per_byte"]
    assert f"| {bits:.4f} |" in table
    assert table.splitlines()[-1].endswith("|  |")  # full attention was not streamed
    assert plot_path(path) == [path.with_suffix(".png")]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_not_evaluated_is_named(tmp_path):
    train(tiny_run(tmp_path, train={"steps": 1}), tmp_path / "run")
    with pytest.raises(ValueError, match="tvq eval"):
        compare.record([tmp_path / "run"])


@pytest.mark.parametrize("content", ["", "{}", "[]", "\x00"])
def test_a_file_without_measurements_cannot_be_drawn(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"file\.json"):
        plot_path(path)


def test_smoothing_is_a_running_mean():
    assert smooth([3.0] * 200) == pytest.approx([3.0] * 200)
    assert smooth([1.0, 2.0]) == [1.0, 2.0]
    values = smooth([float(i % 2) for i in range(1000)])
    assert values[-1] == pytest.approx(0.5, abs=0.05)
