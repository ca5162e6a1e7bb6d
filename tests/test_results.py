"""The records in benchmarks/ can be printed and plotted."""

import json
from pathlib import Path

import pytest

from transformer_vq.bench import (
    ablate,
    compare,
    compress,
    context,
    decode,
    demo,
    documents,
    first_token,
    kernels,
    plots,
    profile,
    recall,
    scaling,
    serve,
    tokenize,
    train,
    variants,
)

FOLDER = Path(__file__).parent.parent / "benchmarks"
TABLES = {
    "ablation": ablate.table,
    "compression": compress.table,
    "context": context.table,
    "decode": decode.table,
    "demo": demo.table,
    "documents": documents.table,
    "first": first_token.table,
    "laws": scaling.table,
    "profile": profile.table,
    "recall": recall.table,
    "scaling": train.table,
    "serve": serve.table,
    "small": compare.table,
    "tokenize": tokenize.table,
    "train": train.table,
    "triton": kernels.table,
    "variants": variants.table,
}
RECORDS = sorted(path.stem for path in FOLDER.glob("*.json"))
FIGURES = sorted(path.stem for path in FOLDER.glob("*.png"))


@pytest.mark.parametrize("name", RECORDS)
def test_record_can_be_printed(name):
    record = json.loads((FOLDER / f"{name}.json").read_text())
    lines = TABLES[name.partition("-")[0]](record).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) >= 3  # header, separator and at least one measurement


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figure_can_be_plotted_again(name, tmp_path):
    out = tmp_path / "figure.png"
    assert plots.plot_path(FOLDER / f"{name}.json", out) == [out]
    assert out.stat().st_size > 0
