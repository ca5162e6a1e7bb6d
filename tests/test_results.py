"""The records in benchmarks/ can be printed and plotted, and agree with RESULTS.md."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))
SCRIPTS = {
    "ablation": "ablate",
    "compression": "compress",
    "first": "first_token",
    "laws": "scaling",
    "profile": "profile_step",
    "scaling": "train",
    "small": "runs",
    "tokenize": "prepare",
    "triton": "kernels",
}
RECORDS = sorted(path.stem for path in FOLDER.glob("*.json"))
FIGURES = sorted(path.stem for path in FOLDER.glob("*.png"))


def table(name):
    kind = name.partition("-")[0]
    script = importlib.import_module(SCRIPTS.get(kind, kind))
    return script.table(json.loads((FOLDER / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", RECORDS)
def test_record_can_be_printed(name):
    rows = [line for line in table(name).splitlines() if line.startswith("|")]
    assert len(rows) >= 3  # header, separator and at least one measurement


@pytest.mark.parametrize("name", ["profile", "ablation", "first-token", "serve-load"])
def test_table_is_that_of_the_results(name):
    text = (FOLDER / "RESULTS.md").read_text()
    missing = [x for x in table(name).splitlines() if x.startswith("|") and x not in text]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_committed_figure_can_be_plotted_again(name, tmp_path):
    figures = importlib.import_module("figures")
    out = tmp_path / "figure.png"
    figures.FIGURES[name](json.loads((FOLDER / f"{name}.json").read_text()), out)
    assert out.stat().st_size > 0
