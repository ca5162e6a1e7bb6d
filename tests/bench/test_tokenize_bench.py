"""`tvq bench tokenize`: throughput next to the library alone, and peak memory."""

import json

import pytest

from transformer_vq.bench import tokenize
from transformer_vq.cli.main import main


@pytest.fixture
def text(tmp_path):
    lines = [f"line {i} of a small text, {i * i} words\n" for i in range(3000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path / "text.txt"


@pytest.mark.parametrize("tokenizer", ["bpe", "sentencepiece"])
def test_tokenize_measures_throughput_and_memory(text, tmp_path, monkeypatch, capsys, tokenizer):
    monkeypatch.setattr(tokenize, "LIBRARY_BYTES", 200_000)
    out = tmp_path / "record.json"
    options = f"--path {text} --tokenizer {tokenizer} --vocab-size 300 --megabytes 1 --out {out}"
    main(["bench", "tokenize", *options.split()])
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert record["vocab_size"] == 300
    assert 0 < record["tokens_per_byte"] < 1
    assert row["megabytes"] == pytest.approx(1, rel=0.2)
    assert row["ratio"] == pytest.approx(row["mb_per_second"] / row["library_mb_per_second"])
    assert 10 < row["peak_mb"] < 1000
    assert capsys.readouterr().out.count("|") > 20


def test_tokenize_rejects_sizes_below_one(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "tokenize", "--megabytes", "0"])
    assert stopped.value.code == 2
    assert "--megabytes 0" in capsys.readouterr().err
