"""tvq: every command on a tiny run; a mistake is one line and exit status 2."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import tiny_run

from transformer_vq import PRESETS
from transformer_vq.cli.main import main
from transformer_vq.files import read_verified_json
from transformer_vq.training.metrics import read_metrics

TINY = {
    "model": ("vocab_size", "d_model", "n_layer", "d_k", "n_code", "block_len"),
    "train": ("steps", "batch_size", "seq_len", "backprop_len", "eval_tokens", "device"),
    "data": ("path", "cache"),
}


def options(tmp_path, **changes):
    """The options that turn a preset into a run of seconds."""
    config = tiny_run(tmp_path, **changes)
    found = []
    for part, names in TINY.items():
        for name in names:
            value = getattr(getattr(config, part), name)
            found += [f"--{part}.{name.replace('_', '-')}", str(value)]
    return found


def train(tmp_path, out="run", *more):
    main(["train", "tiny", *options(tmp_path), "--out", str(tmp_path / out), *more])
    return tmp_path / out


def mistake(capsys, *arguments):
    """The one line on stderr of a command that ends with exit status 2."""
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


def test_train_eval_plot_resume_info(tmp_path, capsys):
    run = train(tmp_path, "run", "--json")
    assert last_json(capsys)["finished"] is True
    main(["eval", str(run), "--split", "test", "--json"])
    facts = last_json(capsys)
    assert set(facts["protocols"]) == {"windowed", "streaming"}
    for result in facts["protocols"].values():
        assert result["bits_per_byte"] > 0
        assert result["tokens"] == result["bytes"] > result["words"] > 0
        assert sum(row["tokens"] for row in result["by_position"]) == result["tokens"]
    assert read_verified_json(run / "evaluation-test.json") == facts
    main(["plot", str(run)])
    written = capsys.readouterr().out.split()
    assert written == [str(run / "curves.png"), str(run / "evaluation-test.png")]
    for path in written:
        with open(path, "rb") as file:
            assert file.read(4) == b"\x89PNG"
    main(["resume", str(run)])
    assert "10 steps" in capsys.readouterr().out
    main(["info", str(run), "--json"])
    assert last_json(capsys)["parameters"] > 0


def test_full_attention_is_evaluated_in_windows_unless_told_otherwise(tmp_path, capsys):
    run = train(tmp_path, "run", "--model.attention", "full")
    capsys.readouterr()
    main(["eval", str(run), "--json"])
    assert list(last_json(capsys)["protocols"]) == ["windowed"]
    main(["eval", str(run), "--protocol", "both", "--json", "--checkpoint", "last"])
    assert list(last_json(capsys)["protocols"]) == ["windowed", "streaming"]


def test_prepare_tells_what_it_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("four words are here " * 100)
    arguments = ["prepare", "text", "--path", str(tmp_path / "a.txt"), "--cache", str(tmp_path)]
    main([*arguments, "--json"])
    facts = last_json(capsys)
    assert facts["splits"]["train"]["tokens"] == 1800
    assert facts["splits"]["train"]["words"] == 360
    main(arguments)
    assert "1,800 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", PRESETS)
def test_info_of_every_preset(name, capsys):
    main(["info", name])
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: shga, vq attention")
    assert "FLOPs per token" in out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help_needs_nothing(arguments, capsys):
    with contextlib.suppress(SystemExit):
        main(arguments)
    out = capsys.readouterr().out
    assert out.startswith("usage: tvq")


@pytest.mark.parametrize("command", [["train", "tiny"], ["info", "tiny"], ["prepare"], ["plot"]])
def test_help_of_a_command_lists_its_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    if command[-1] == "tiny":
        assert "--model.n-code" in out
        assert "Codewords per codebook." in out


def test_a_command_or_preset_that_does_not_exist(capsys):
    assert "did you mean train?" in mistake(capsys, "trian")
    assert "did you mean tiny?" in mistake(capsys, "train", "tinny")
    assert "enwik8-190m" in mistake(capsys, "info", "gpt")
    assert "needs a PRESET" in mistake(capsys, "train")
    assert "needs a RUN" in mistake(capsys, "resume", "--json")


def test_options_that_make_no_sense(tmp_path, capsys):
    assert "--model.codes" in mistake(capsys, "train", "tiny", "--model.codes", "3")
    assert "--model.n-code" in mistake(capsys, "train", "tiny", "--model.n-code", "many")
    assert "--model.n-code 0: must be" in mistake(capsys, "train", "tiny", "--model.n-code", "0")
    assert "not a multiple" in mistake(capsys, "train", "tiny", "--train.backprop-len", "100")
    out = ["--out", tmp_path / "run"]
    line = mistake(capsys, "train", "tiny", *options(tmp_path), "--train.device", "tpu", *out)
    assert "'tpu'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), (b"", "is empty"), (b"too short", "fewer than one sequence")],
)
def test_text_that_cannot_be_trained_on(tmp_path, capsys, content, says):
    common = options(tmp_path)
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content * 4)
    out = tmp_path / "run"
    line = mistake(capsys, "train", "tiny", *common, "--data.path", path, "--out", out)
    assert says in line
    assert not out.exists()


def test_a_zip_cut_short(tmp_path, capsys):
    common = options(tmp_path)
    path = tmp_path / "enwik8.zip"
    path.write_bytes(b"PK\x03\x04 and then nothing")
    line = mistake(
        capsys, "train", "tiny", *common, "--data.dataset", "enwik8", "--data.path", path
    )
    assert str(path) in line


def test_a_missing_folder_and_a_wrong_vocabulary(tmp_path, capsys):
    common = options(tmp_path)
    books = tmp_path / "no-books"
    line = mistake(
        capsys, "train", "pg19-1.3b", *common, "--data.path", books, "--out", tmp_path / "run"
    )
    assert "no-books" in line
    line = mistake(
        capsys, "train", "tiny", *common, "--model.vocab-size", "300", "--out", tmp_path / "run"
    )
    assert "set --model.vocab-size to 256" in line
    assert "imagenet64 is not downloaded" in mistake(capsys, "prepare", "imagenet64")
    cache = tmp_path / "empty-cache"
    line = mistake(capsys, "train", "enwik8-190m", "--data.cache", cache, "--out", tmp_path / "run")
    assert "tvq prepare enwik8" in line
    assert not (tmp_path / "run").exists()


def test_runs_that_are_not_there_or_not_the_same(tmp_path, capsys):
    for command in ("resume", "eval"):
        assert "is not a run folder" in mistake(capsys, command, tmp_path / "nothing")
    assert "does not exist" in mistake(capsys, "plot", tmp_path / "nothing")
    run = train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = mistake(capsys, "resume", run, "--model.n-code", "9", "--optim.lr", "1")
    assert "--model.n-code (7 -> 9)" in line
    assert "optim.lr" in line
    line = mistake(capsys, "train", "tiny", *options(tmp_path), "--out", run)
    assert "tvq resume" in line
    assert "no checkpoint" in mistake(capsys, "eval", run, "--checkpoint", "77")
    for option in ("batch-size", "seq-len", "max-tokens"):
        for size in ("0", "-1"):
            line = mistake(capsys, "eval", run, f"--{option}", size)
            assert f"--{option} {size}: must be at least 1" in line
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    assert after.items() <= before.items()


def test_a_signal_ends_the_command_with_the_line_that_resumes(tmp_path):
    """In a process as users start it; other signals and moments are in training/test_signals.py."""
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


def test_python_m_is_the_command():
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "transformer_vq", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tvq: there is no command 'nonsense'")
