"""Commands on text of other formats: prepare, evaluate everything, sample until the end."""

import json

import pytest
from test_cli import last_json, train, user_error

from transformer_vq.cli.main import main


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "documents.jsonl"
    rows = [{"body": f"document {i} ends here", "id": i} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prepare_reads_a_field_learns_a_vocabulary_and_prints_json(jsonl, tmp_path, capsys):
    arguments = ["prepare", "text", "--path", str(jsonl), "--cache", str(tmp_path / "cache")]
    main([*arguments, "--tokenizer", "bpe", "--vocab-size", "280", "--json"])
    record = last_json(capsys)
    assert record["vocab_size"] == 280
    sizes = record["splits"]
    assert set(sizes) == {"train", "validation", "test"}
    assert sum(size["documents"] for size in sizes.values()) == 300
    assert sum(size["words"] for size in sizes.values()) == 1200
    main([*arguments, "--validation-share", "0", "--test-share", "0", "--json"])
    assert list(last_json(capsys)["splits"]) == ["train"]


def test_prepare_names_its_own_options(jsonl, tmp_path, capsys):
    arguments = ["prepare", "text", "--path", jsonl, "--cache", tmp_path / "cache"]
    assert "set --text-field" in user_error(capsys, *arguments, "--text-field", "x")
    assert "--tokenizer bpe" in user_error(capsys, *arguments, "--vocab-size", "300")
    message = user_error(capsys, *arguments, "--tokenizer", "bpe", "--vocab-size", "9000")
    assert "--vocab-size to at most" in message
    assert "did you mean text?" in user_error(capsys, "prepare", "txt")


def test_eval_scores_whole_files(tmp_path, capsys):
    run = train(tmp_path)
    book = tmp_path / "book.txt"
    book.write_text("A short book about nothing.\n" * 7)
    capsys.readouterr()
    main(["eval", str(run), "--data.path", str(book), "--split", "all", "--json"])
    record = last_json(capsys)
    assert record["split"] == "all"
    for result in record["protocols"].values():
        assert result["bytes"] == len(book.read_bytes())
        assert result["bits_per_byte"] > 0
    assert not list(run.glob("evaluation-*.json"))  # these are not results on its own data


def test_sample_in_bf16_and_past_the_end(tmp_path, capsys):
    run = train(tmp_path)
    capsys.readouterr()
    arguments = ["sample", str(run), "--tokens", "30", "--batch", "2", "--seed", "1", "--json"]
    for more in ([], ["--precision", "bf16"], ["--no-stop-at-end"]):
        main([*arguments, *more])
        record = last_json(capsys)
        assert len(record["texts"]) == len(record["ended"]) == 2
    assert record["ended"] == [False, False]
