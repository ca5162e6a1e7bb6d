"""The README says what is so: its snippets run, its references exist, its figures were measured."""

import importlib
import json
import re
from pathlib import Path

import pytest

from transformer_vq.bench import compare, context, decode, demo, documents, train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_snippets_run_in_order():
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(snippets) >= 3
    namespace: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)


KINDS = "Definition|Theorem|Corollary|Remark|Section|Table|Code"
ROWS = re.findall(rf"^\| ((?:{KINDS})s? [^|]*)\|([^|]*)\|([^|]*)\|$", README, flags=re.MULTILINE)


def test_every_numbered_statement_of_the_paper_is_in_the_table():
    named = " ".join(paper for paper, _, _ in ROWS)
    numbers = set(re.findall(r"\d\.\d+", named))
    assert numbers >= {f"2.{n}" for n in range(1, 9)} | {f"3.{n}" for n in range(1, 11)}
    assert all(f"Code {n}" in named for n in range(1, 5))


@pytest.mark.parametrize(("paper", "code", "test"), ROWS, ids=[paper for paper, _, _ in ROWS])
def test_the_table_points_at_things_that_exist(paper, code, test):
    for module, name in re.findall(r"`([\w/]+)\.py`(?: `([\w.]+)`)?", code):
        found = importlib.import_module(f"transformer_vq.{module.replace('/', '.')}")
        for part in name.split(".") if name else []:
            found = getattr(found, part)
    path, _, function = test.strip().strip("`").partition("::")
    assert (ROOT / path).is_file()
    assert not function or f"def {function}(" in (ROOT / path).read_text()


def test_the_cost_of_documents_is_the_recorded_one():
    result = json.loads((ROOT / "benchmarks" / "documents.json").read_text())
    assert documents.table(result) in README


def test_decoding_is_the_recorded_one():
    result = json.loads((ROOT / "benchmarks" / "decode.json").read_text())
    assert decode.table(result) in README
    rows = {
        (row["kind"], row["compiled"], row["batch"], row["context"]): row
        for row in result["decode"]
        if "failed" not in row
    }
    for compiled in (False, True):
        for batch in (1, 8):
            short, long = (rows["vq", compiled, batch, n] for n in (8192, 524_288))
            assert long["state_bytes"] == short["state_bytes"]
            assert long["ms_per_step"] <= 1.1 * short["ms_per_step"]
    peaks = {row["context"]: row["peak_bytes"] for row in result["reading"]}
    assert peaks[1_048_576] <= 1.2 * peaks[65_536]


def test_what_crosses_between_processes_is_the_recorded_one():
    result = json.loads((ROOT / "benchmarks" / "context.json").read_text())
    assert context.table(result) in README
    short, long = (row for row in result["rows"] if row["processes"] == 4)
    assert short["bytes_per_layer"] == long["bytes_per_layer"]
    assert long["loss"] is not None
    assert next(row for row in result["rows"] if row["processes"] == 1 and row["loss"] is None)


def test_the_tree_lists_every_module():
    for path in (ROOT / "transformer_vq").rglob("*.py"):
        if path.name != "__init__.py" and path.parent.name != "bench":
            assert re.search(rf"^ +{path.name} ", README, flags=re.MULTILINE), path


def test_figures_are_those_of_the_recorded_benchmark():
    result = json.loads((ROOT / "benchmarks" / "scaling.json").read_text())
    assert train.table(result) in README
    rows = {row["seq_len"]: row for row in result["rows"] if row["attention"] == "vq"}
    time = rows[131_072]["us_per_token"] / rows[8192]["us_per_token"]
    assert f"| {time:.2f} | `make bench` |" in README
    assert f"| {rows[131_072]['peak_gb']:.1f} GB | `make bench` |" in README


def test_trained_runs_are_the_recorded_ones():
    result = json.loads((ROOT / "benchmarks" / "small.json").read_text())
    assert compare.table(result) in README
    bits = {
        run["config"]["model"]["attention"]: run["evaluation"]["protocols"]["windowed"]
        for run in result["runs"].values()
    }
    ratio = bits["vq"]["bits_per_byte"] / bits["full"]["bits_per_byte"]
    assert f"{ratio:.3f}" in README


def test_the_demo_is_the_recorded_one():
    figures = json.loads((ROOT / "benchmarks" / "demo.json").read_text())
    assert demo.table(figures) in README
    sample = "\n".join(f"    {line}".rstrip() for line in figures["sample"].splitlines()[:8])
    assert sample in README
