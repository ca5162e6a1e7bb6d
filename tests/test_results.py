"""The records in benchmarks/ can be printed and plotted, and agree with the pages."""

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


def record(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def table(name):
    kind = name.partition("-")[0]
    return importlib.import_module(SCRIPTS.get(kind, kind)).table(record(name))


@pytest.mark.parametrize("name", RECORDS)
def test_record_can_be_printed(name):
    rows = [line for line in table(name).splitlines() if line.startswith("|")]
    assert len(rows) >= 3  # header, separator and at least one measurement


@pytest.mark.parametrize(
    "name", ["profile", "ablation", "first-token", "serve-load", "distributed"]
)
def test_table_is_that_of_the_results(name):
    text = (FOLDER / "RESULTS.md").read_text()
    missing = [x for x in table(name).splitlines() if x.startswith("|") and x not in text]
    assert missing == []


def test_speed_ups_of_the_readme_are_those_of_the_records():
    readme = (FOLDER.parent / "README.md").read_text()

    def values(column, attention, *names):
        """Return the values of a column by sequence length."""
        found = {}
        for row in (row for name in names for row in record(name)["rows"]):
            if row["attention"] == attention:
                found.setdefault(row["seq_len"], []).append(row[column])
        return found

    (full,) = values("seconds", "full", "train-bf16-32k")[32768]
    (vq,) = values("seconds", "vq", "train-bf16-32k-recomputed")[32768]
    assert f"{full / vq:.1f}x; the paper reports 12.6x" in readme
    over = values("over_sdpa", "vq", "train-quick", "train-fp32")
    short, long = (f"{min(over[n]):.1f}x to {max(over[n]):.1f}x" for n in (2048, 8192))
    at_32k = f"{over[32768][0]:.1f}x at 32,768"
    assert f"{short} at 2,048 tokens, {long} at 8,192, {at_32k}" in readme
    (scaled,) = values("over_full", "vq", "scaling")[8192]
    assert f"{scaled:.1f}x faster than full attention at 8,192" in readme


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_committed_figure_can_be_plotted_again(name, tmp_path):
    figures = importlib.import_module("figures")
    out = tmp_path / "figure.png"
    figures.FIGURES[name](record(name), out)
    assert out.stat().st_size > 0
