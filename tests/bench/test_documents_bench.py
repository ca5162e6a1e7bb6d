"""`tvq bench documents`: its table and its errors; `test_train_bench` runs the command."""

from dataclasses import asdict

import pytest

from transformer_vq.bench import documents, train
from transformer_vq.bench.defaults import Shape
from transformer_vq.cli.main import main

SHAPE = Shape(d_model=16, d_k=8, n_code=7, block_len=4, device="cpu")
SMALL = ["--d-model", "16", "--d-k", "8", "--n-code", "7", "--block-len", "4", "--device", "cpu"]


def test_documents_table_reports_a_failed_step():
    rows = [asdict(cell) for cell in documents.cells(SHAPE, 20, 7)]
    rows[0]["failed"] = "out of memory"
    rows[1]["us_per_token"] = rows[2]["us_per_token"] = 3.0
    lines = documents.table({"rows": rows}).splitlines()
    assert lines[2:] == [
        "| none | out of memory |  |",
        "| one | 3.0 |  |",
        "| of 7 tokens | 3.0 |  |",
    ]


def test_documents_rejects_a_document_len_of_zero(monkeypatch, capsys):
    monkeypatch.setattr(train, "in_subprocess", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "documents", *SMALL, "--document-len", "0"])
    assert stopped.value.code == 2
    assert "--document-len 0" in capsys.readouterr().err
