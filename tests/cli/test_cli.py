"""Every tvq command on a tiny run; user errors are one line and exit status 2."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import tiny_run

from transformer_vq import PRESETS, __version__
from transformer_vq.cli.main import COMMANDS, main
from transformer_vq.files import read_object
from transformer_vq.training.metrics import read_metrics

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


def user_error(capsys, *arguments):
    """Run a command that must exit with status 2; return its only line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


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


def test_eval_prints_one_line_per_protocol_and_positions_on_request(tmp_path, capsys):
    run = train(tmp_path)
    capsys.readouterr()
    main(["eval", str(run)])
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r", windowed .*\d\.\d{4} bits per byte", line)
    assert list(read_object(run / "evaluation-test.json")["protocols"]) == ["windowed"]
    main(["eval", str(run), "--protocol", "both"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.search("windowed|streaming", x)[0] for x in lines] == ["windowed", "streaming"]
    main(["eval", str(run), "--protocol", "streaming", "--positions"])
    first, *table = capsys.readouterr().out.splitlines()
    assert "streaming" in first
    assert [x for x in table if x.startswith("| 0 |")]


def test_warm_up_that_is_longer_than_the_run_is_reported_once(tmp_path, capsys):
    train(tmp_path, "short", "--optim.warmup", "10")  # of 10 steps
    assert capsys.readouterr().err.count("--optim.warmup 10") == 1
    train(tmp_path, "long", "--optim.warmup", "9")
    assert "--optim.warmup" not in capsys.readouterr().err


def test_eval_of_full_attention_defaults_to_the_windowed_protocol(tmp_path, capsys):
    run = train(tmp_path, "run", "--model.attention", "full")
    capsys.readouterr()
    main(["eval", str(run), "--json"])
    assert list(last_json(capsys)["protocols"]) == ["windowed"]
    main(["eval", str(run), "--protocol", "both", "--json", "--checkpoint", "last"])
    assert list(last_json(capsys)["protocols"]) == ["windowed", "streaming"]


def test_prepare_prints_the_sizes_of_the_splits(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("four words are here " * 100)
    arguments = ["prepare", "text", "--path", str(tmp_path / "a.txt"), "--cache", str(tmp_path)]
    main([*arguments, "--json"])
    record = last_json(capsys)
    assert record["splits"]["train"]["tokens"] == 1800
    assert record["splits"]["train"]["words"] == 360
    main(arguments)
    assert "1,800 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", PRESETS)
def test_info_accepts_every_preset(name, capsys):
    main(["info", name])
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: {PRESETS[name].model.head_type}, vq attention")
    assert "FLOPs per token" in out


def help_of(capsys, *arguments):
    """Return what a command prints that must exit with status 0."""
    capsys.readouterr()
    status = 0
    try:
        main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    assert status == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_all_commands(arguments, capsys):
    out = help_of(capsys, *arguments)
    assert out.startswith("usage: tvq COMMAND")
    for name, (_, summary) in COMMANDS.items():
        assert f"{name:<9} {summary}" in out


def test_version_is_that_of_the_package(capsys):
    assert help_of(capsys, "--version") == f"tvq {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "option", "text"),
    [
        ("train tiny", "--model.n-code", "Codewords per codebook."),
        ("train", "--model.n-code", "shown for the preset tiny"),
        ("resume", "--train.save-every", "shown for the preset tiny"),
        ("info tiny", "--model.n-code", "Codewords per codebook."),
        ("info", "--parallel.fsdp", "shown for the preset tiny"),
        ("eval", "--data.path", "--max-tokens"),
        ("sample", "--save-state", "number of tokens to generate."),
        ("export", "--checkpoint", "FOLDER"),
        ("export", "--max-shard-size", "500MB"),
        ("export", "--push-to-hub", "--private"),
        ("export", "--format", "onnx"),
        ("prepare", "--vocab-size", "enwik8 is downloaded"),
        ("plot", "--overwrite", "PATH"),
        ("config", "--changed-only", "shown for the preset tiny"),
        ("config tiny", "--format", "Codewords per codebook."),
        ("runs", "--sort", "[DIR]"),
        ("doctor", "--quick", "The exit status is 1 if a check failed."),
    ],
)
def test_help_of_a_command_lists_its_options(arguments, option, text, capsys):
    out = help_of(capsys, *arguments.split(), "--help-all")
    assert out.startswith(f"usage: tvq {arguments}")
    assert option in out
    assert text in " ".join(out.split())


def test_help_and_usage_errors_do_not_import_torch():
    program = """
import contextlib, io, sys
import transformer_vq.cli.main as cli

assert not {"torch", "numpy", "tyro"} & sys.modules.keys()
lines = [[name, "--help"] for name in cli.COMMANDS]
errors = [["trian"], ["train"], ["train", "tinny"], ["train", "tiny", "--x"]]
errors += [["info", "--config", "no.toml"], ["train", "tiny", "--data.path"]]
errors += [["runs", "nothing"], ["plot"]]
errors += [["sample", "run", "--tokens", "many"], ["sample", "run", "--tokens", "-1"]]
for line in [["--help"], ["--version"], ["runs"], ["config", "tiny"], *lines, *errors]:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line)
        except SystemExit as stop:
            status = stop.code or 0
    assert status == (2 if line in errors else 0), (line, status, err.getvalue())
    assert err.getvalue().startswith("tvq: ") == (line in errors), (line, err.getvalue())
    assert (out.getvalue() == "") == (line in errors), (line, out.getvalue())
    assert not {"torch", "numpy"} & sys.modules.keys(), line
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_unknown_commands_and_presets_are_rejected_with_a_suggestion(capsys):
    assert "did you mean train?" in user_error(capsys, "trian")
    assert "did you mean tiny?" in user_error(capsys, "train", "tinny")
    assert "enwik8-190m" in user_error(capsys, "info", "gpt")
    assert "needs a PRESET" in user_error(capsys, "train")
    assert "needs a RUN" in user_error(capsys, "resume", "--json")


def test_invalid_options_are_rejected_before_training(tmp_path, capsys):
    assert "--model.codes" in user_error(capsys, "train", "tiny", "--model.codes", "3")
    assert "--model.n-code" in user_error(capsys, "train", "tiny", "--model.n-code", "many")
    assert "--model.n-code 0: must be" in user_error(capsys, "train", "tiny", "--model.n-code", "0")
    assert "not a multiple" in user_error(capsys, "train", "tiny", "--train.backprop-len", "100")
    out = ["--out", tmp_path / "run"]
    line = user_error(capsys, "train", "tiny", *options(tmp_path), "--train.device", "tpu", *out)
    assert "'tpu'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b"too short", "fewer than one sequence")],
)
def test_train_rejects_unusable_text(tmp_path, capsys, content, message):
    common = options(tmp_path, without=["path"])
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content * 4)
    out = tmp_path / "run"
    line = user_error(capsys, "train", "tiny", *common, "--data.path", path, "--out", out)
    assert message in line
    assert not out.exists()


def test_train_rejects_a_truncated_zip(tmp_path, capsys):
    common = options(tmp_path, without=["path"])
    path = tmp_path / "enwik8.zip"
    path.write_bytes(b"PK\x03\x04 and then nothing")
    line = user_error(
        capsys, "train", "tiny", *common, "--data.dataset", "enwik8", "--data.path", path
    )
    assert str(path) in line


def test_train_rejects_a_missing_folder_or_a_wrong_vocabulary_size(tmp_path, capsys):
    common = options(tmp_path)
    books = tmp_path / "no-books"
    other = options(tmp_path, without=["path"])
    line = user_error(
        capsys, "train", "pg19-1.3b", *other, "--data.path", books, "--out", tmp_path / "run"
    )
    assert "no-books" in line
    line = user_error(
        capsys, "train", "tiny", *common, "--model.vocab-size", "300", "--out", tmp_path / "run"
    )
    assert "set --model.vocab-size to 257" in line
    assert "imagenet64 is not downloaded" in user_error(capsys, "prepare", "imagenet64")
    cache = tmp_path / "empty-cache"
    line = user_error(
        capsys, "train", "enwik8-190m", "--data.cache", cache, "--out", tmp_path / "run"
    )
    assert "tvq prepare enwik8" in line
    assert not (tmp_path / "run").exists()


def test_missing_runs_and_changed_settings_are_rejected(tmp_path, capsys):
    for command in ("resume", "eval"):
        assert "is not a run folder" in user_error(capsys, command, tmp_path / "nothing")
    assert "does not exist" in user_error(capsys, "plot", tmp_path / "nothing")
    run = train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = user_error(capsys, "resume", run, "--model.n-code", "9", "--optim.warmup", "1")
    assert "--model.n-code (7), --optim.warmup (100) cannot change" in line
    assert "--train.init-from" in line
    line = user_error(capsys, "resume", run, "--model.no_compressive_cache", "--train.seed=9")
    assert "--model.compressive-cache (True), --train.seed (0) cannot change" in line
    line = user_error(capsys, "train", "tiny", *options(tmp_path), "--out", run)
    assert "tvq resume" in line
    assert "no checkpoint" in user_error(capsys, "eval", run, "--checkpoint", "77")
    for option in ("batch-size", "seq-len", "max-tokens"):
        for size in ("0", "-1"):
            line = user_error(capsys, "eval", run, f"--{option}", size)
            assert f"--{option} {size}: must be at least 1" in line
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    assert after.items() <= before.items()


def test_signal_stops_training_and_prints_the_resume_command(tmp_path):
    """Use a subprocess, as users do; other signals are tested in training/test_signals.py."""
    run, number = tmp_path / "run", signal.SIGINT
    command = [sys.executable, "-m", "transformer_vq", "train", "tiny", *options(tmp_path)]
    command += ["--train.steps", "100000", "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(read_metrics(run)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"continue with: tvq resume {run}" in out
    assert "Traceback" not in err
    steps = [row["step"] for row in read_metrics(run)]
    assert (run / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()


def test_python_m_runs_the_command():
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "transformer_vq", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tvq: unknown command 'nonsense'")
