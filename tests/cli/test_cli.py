"""Every tvq command on a tiny run; user errors are short and have exit status 2."""

import json
import math
import re
import subprocess
import sys

import pytest
from cli_sandbox import short_message
from helpers import tiny_run

from transformer_vq.cli.main import main
from transformer_vq.files import read_object

TINY = {
    "model": ("vocab_size", "d_model", "n_layer", "d_k", "n_code", "block_len"),
    "train": ("steps", "batch_size", "seq_len", "backprop_len", "eval_tokens", "device"),
    "data": ("path", "cache"),
}


def options(tmp_path, without=()):
    """Return the options that turn a preset into a run of a few seconds."""
    config = tiny_run(tmp_path)
    found = []
    for part, names in TINY.items():
        for name in names:
            if name in without:
                continue
            value = getattr(getattr(config, part), name)
            values = value if isinstance(value, tuple) else (value,)
            found += [f"--{part}.{name.replace('_', '-')}", *map(str, values)]
    return found


def train(tmp_path, out="run", *more):
    main(["train", "tiny", *options(tmp_path), "--out", str(tmp_path / out), *more])
    return tmp_path / out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that no test changes."""
    return train(tmp_path_factory.mktemp("shared"))


def user_error(capsys, *arguments):
    """Run a command that must exit with status 2; return its message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    return short_message(captured.err)


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_eval_plot_resume_and_info_work_on_one_run(tmp_path, capsys):
    run = train(tmp_path, "run", "--json")
    captured = capsys.readouterr()
    final_line, *_, last = captured.out.splitlines()
    record = json.loads(last)
    assert record["finished"] is True
    bits = record["best_validation_bits_per_byte"]
    assert bits == pytest.approx(record["best_validation_nats_per_token"] / math.log(2))
    # The final line and the validation messages show the same unit.
    assert final_line == f"{run}: 10 steps, best validation {bits:.4f} bits/byte"
    assert f"validation {bits:.4f} bits/byte" in captured.err
    main(["eval", str(run), "--split", "test", "--json"])
    record = last_json(capsys)
    assert set(record["protocols"]) == {"windowed", "streaming"}
    for result in record["protocols"].values():
        assert result["bits_per_byte"] > 0
        assert result["tokens"] > result["bytes"] > result["words"] > 0  # with ends of documents
        assert sum(row["tokens"] for row in result["by_position"]) == result["tokens"]
    assert read_object(run / "evaluation-test.json") == record
    main(["plot", str(run)])
    written = capsys.readouterr().out.split()
    assert written == [str(run / "curves.png"), str(run / "evaluation-test.png")]
    for path in written:
        with open(path, "rb") as file:
            assert file.read(4) == b"\x89PNG"
    main(["resume", str(run)])
    assert capsys.readouterr().out.startswith(f"{final_line}\n")
    main(["info", str(run), "--json"])
    assert last_json(capsys)["parameters"] > 0
    main(["info", "pg19-1.3b"])
    assert capsys.readouterr().out.startswith("pg19-1.3b: shga, vq attention")


def test_eval_prints_one_line_per_protocol_and_positions_on_request(run, capsys):
    capsys.readouterr()
    main(["eval", str(run), "--max-tokens", "40"])
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r", windowed .*\d\.\d{4} bits per byte", line)
    main(["eval", str(run), "--protocol", "both", "--max-tokens", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.search("windowed|streaming", x)[0] for x in lines] == ["windowed", "streaming"]
    main(["eval", str(run), "--protocol", "streaming", "--positions", "--max-tokens", "40"])
    first, *table = capsys.readouterr().out.splitlines()
    assert "streaming" in first
    assert [x for x in table if x.startswith("| 0 |")]


def test_full_attention_defaults_to_the_windowed_protocol_and_a_long_warm_up_is_reported(
    tmp_path, capsys
):
    run = train(tmp_path, "run", "--model.attention", "full", "--optim.warmup", "10")
    assert capsys.readouterr().err.count("--optim.warmup 10") == 1  # of 10 steps
    main(["eval", str(run), "--json"])
    assert list(last_json(capsys)["protocols"]) == ["windowed"]
    main(["eval", str(run), "--protocol", "both", "--json", "--checkpoint", "last"])
    assert list(last_json(capsys)["protocols"]) == ["windowed", "streaming"]


def test_train_rejects_a_missing_dataset_or_a_wrong_vocabulary_size(tmp_path, capsys):
    common = [*options(tmp_path), "--out", tmp_path / "run"]
    line = user_error(capsys, "train", "tiny", *common, "--model.vocab-size", "300")
    assert "set --model.vocab-size to 257" in line
    assert "imagenet64 is not downloaded" in user_error(capsys, "prepare", "imagenet64")
    cache = tmp_path / "empty-cache"
    line = user_error(
        capsys, "train", "enwik8-190m", "--data.cache", cache, "--out", tmp_path / "run"
    )
    assert "tvq prepare enwik8" in line
    assert not (tmp_path / "run").exists()


def test_missing_runs_and_changed_settings_are_rejected(run, tmp_path, capsys):
    for command in ("resume", "eval"):
        assert "is not a run folder" in user_error(capsys, command, tmp_path / "nothing")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = user_error(capsys, "resume", run, "--model.n-code", "9", "--optim.warmup", "1")
    assert "--model.n-code (7 -> 9), --optim.warmup (100 -> 1); resume without these" in line
    assert "--train.init-from" in line
    line = user_error(capsys, "train", "tiny", *options(tmp_path), "--out", run)
    assert "tvq resume" in line
    assert "no checkpoint" in user_error(capsys, "eval", run, "--checkpoint", "77")
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    assert after.items() <= before.items()


def test_python_m_runs_the_command():
    command = [sys.executable, "-m", "transformer_vq", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tvq: unknown command 'trian' (did you mean train?); see tvq --help\n"


def test_prepare_reads_a_field_learns_a_vocabulary_and_names_its_own_options(tmp_path, capsys):
    path = tmp_path / "documents.jsonl"
    rows = [{"body": f"document {i} ends here", "id": i} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["prepare", "text", "--path", str(path), "--cache", str(tmp_path / "cache")]
    main([*arguments, "--tokenizer", "bpe", "--vocab-size", "280", "--json"])
    record = last_json(capsys)
    assert record["vocab_size"] == 280
    sizes = record["splits"]
    assert set(sizes) == {"train", "validation", "test"}
    assert sum(size["documents"] for size in sizes.values()) == 300
    assert sum(size["words"] for size in sizes.values()) == 1200
    main([*arguments, "--validation-share", "0", "--test-share", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[1:]] == ["train"]
    assert "300 documents" in lines[1]
    assert "set --text-field" in user_error(capsys, *arguments, "--text-field", "x")
    message = user_error(capsys, *arguments, "--tokenizer", "bpe", "--vocab-size", "9000")
    assert "--vocab-size to at most" in message


def test_eval_of_other_data_is_not_recorded_in_the_run(run, capsys):
    main(["eval", str(run), "--data.path", __file__, "--split", "all", "--json"])
    assert last_json(capsys)["split"] == "all"
    assert not list(run.glob("evaluation-*.json"))


def test_sample_in_bf16_and_past_the_end(run, capsys):
    capsys.readouterr()
    arguments = ["sample", str(run), "--tokens", "30", "--batch", "2", "--seed", "1", "--json"]
    for more in ([], ["--precision", "bf16"], ["--no-stop-at-end"]):
        main([*arguments, *more])
        record = last_json(capsys)
        assert len(record["texts"]) == len(record["ended"]) == 2
    assert record["ended"] == [False, False]
