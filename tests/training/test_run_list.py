"""Run folders are found and summarized without torch; damaged ones are reported as corrupt."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import interrupted, tiny_run

from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import locked
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import resume, train
from transformer_vq.training.run_list import dataset_name, find_runs, is_running, summarize


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_run(folder), folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run_that_was_stopped_in_its_last_step_is_finished_after_resuming(tmp_path):
    run = tmp_path / "run"
    assert not interrupted(9, train, tiny_run(tmp_path), run).finished
    assert summarize(run).status == "stopped"
    assert resume(run).finished
    assert summarize(run).status == "finished"


def test_finished_run_is_summarized(run, tmp_path):
    found = summarize(run)
    assert found.status == "finished"
    assert found.step == found.steps == 10
    validations = [row for row in read_metrics(run) if row["kind"] == "validation"]
    assert found.best_bits_per_byte == min(row["bits_per_byte"] for row in validations)
    assert found.parameters == sizes(tiny_run(tmp_path)).parameters
    assert found.dataset == "text"
    assert found.bytes == sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert found.changed == max(path.stat().st_mtime for path in run.rglob("*.json*"))


def test_stopped_and_running_runs_are_told_apart(tmp_path):
    interrupted(5, train, tiny_run(tmp_path), tmp_path / "run")
    assert (summarize(tmp_path / "run").status, summarize(tmp_path / "run").step) == ("stopped", 6)
    with locked(tmp_path / "run"):
        assert is_running(tmp_path / "run")
        assert summarize(tmp_path / "run").status == "running"
    assert not is_running(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert summarize(tmp_path / "run").status == "no checkpoint"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"model": 3}'),
        ("checkpoints/step-*/training.json", b"\xff"),
    ],
)
def test_damaged_runs_are_corrupt(run, name, content):
    for path in run.glob(name):
        path.write_bytes(content)
    found = summarize(run)
    assert found.status == "corrupt"
    assert found.bytes > 0


def test_runs_are_found_in_subfolders_but_not_in_runs(tmp_path):
    for name in ("a", "b/c/d/e", "a/inside", ".hidden/f", "1/2/3/4/5"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    assert [str(x.relative_to(tmp_path)) for x in find_runs(tmp_path)] == ["a", "b/c/d/e"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]


def test_datasets_are_named_by_their_first_path(tmp_path):
    config = tiny_run(tmp_path)
    data = replace(config.data, path=("/x/books.jsonl", "/y"))
    assert dataset_name(replace(config, data=data)) == "books.jsonl +1"
    assert dataset_name(replace(config, data=replace(data, path=()))) == "text"


def test_summaries_do_not_need_torch(run):
    program = f"""
import sys
from pathlib import Path
from transformer_vq.training.run_list import summarize
assert summarize(Path({str(run)!r})).status == "finished"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
