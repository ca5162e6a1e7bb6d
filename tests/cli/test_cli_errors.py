"""Invalid command lines, missing packages, full disks: one line and exit status 2."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from cli_sandbox import Sandbox
from command_lines import TINY

from transformer_vq.cli.main import main
from transformer_vq.cli.output import out_of_memory_advice


@pytest.fixture(scope="module")
def shared_sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("errors") / "sandbox")


@pytest.fixture
def sandbox(shared_sandbox):
    yield shared_sandbox
    shared_sandbox.restore()


def user_error(sandbox, line, prepare=None, **limits):
    """Run a command that must exit with status 2; return its error line."""
    ended = sandbox.run(line.split(" "), prepare, **limits)
    assert ended.status == 2, ended
    assert not ended.has_traceback, ended.err
    *others, last = ended.err.strip().splitlines()
    assert last.startswith("tvq: "), ended.err
    assert not [x for x in others if not x.startswith(PROGRESS)], ended.err
    return last


def succeed(sandbox, line, prepare=None):
    ended = sandbox.run(line.split(" "), prepare)
    assert ended.status == 0, ended
    return ended.out


PROGRESS = ("step ", "Writing model shards")
TRAIN = f"train tiny {TINY} --data.path texts --out new-run"


def test_info_rejects_more_processes_than_sequences(sandbox):
    assert "--train.batch-size" in user_error(sandbox, "info tiny --parallel.dp 300")


def test_train_out_of_memory_suggests_options(sandbox):
    large = "--model.d-model 256 --train.batch-size 512 --train.seq-len 64 --train.backprop-len 64"
    line = user_error(sandbox, f"{TRAIN} {large} --train.steps 1", memory_gb=0.5)
    assert "out of memory" in line
    assert "--train.batch-size" in line


@pytest.mark.parametrize("advice", [out_of_memory_advice("use less"), nullcontext()])
def test_the_message_about_memory_is_printed_after_tensors_are_freed(monkeypatch, capsys, advice):
    tensors, freed = [], []

    def run(arguments):
        tensor = torch.zeros(3)
        tensors.append(weakref.ref(tensor))
        with advice:
            raise MemoryError

    def shorten(message):
        freed.append(tensors[0]() is None)
        return message

    monkeypatch.setattr("transformer_vq.cli.info.run", run)
    monkeypatch.setattr("transformer_vq.cli.main.one_line", shorten)
    with pytest.raises(SystemExit) as stop:
        main(["info"])
    assert (stop.value.code, freed) == (2, [True])
    assert capsys.readouterr().err.startswith("tvq: out of memory; use ")


def test_sample_out_of_memory_suggests_options(sandbox):
    line = user_error(sandbox, "sample text-run --tokens 2 --batch 4000000", memory_gb=0.5)
    assert "out of memory" in line
    assert "--batch" in line


def full_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_export_on_a_full_disk_leaves_no_files(sandbox):
    assert "new-export" in user_error(sandbox, "export text-run new-export", full_disk)
    assert not (sandbox.work / "new-export").exists()
    assert not list(sandbox.work.glob(".*"))


@pytest.mark.parametrize(
    "line",
    [
        "sample text-run --tokens 1 --save-state new-state",
        "plot text-run --out new.png",
        "report text-run --samples 0 --out new.html",
        "prepare text --path texts --cache new-cache",
    ],
)
def test_full_disk_is_one_error_line_and_leaves_no_files(sandbox, line):
    user_error(sandbox, line, full_disk)
    assert not list(sandbox.work.glob("new[-.]*")) or "cache" in line
    assert not list(sandbox.work.glob("new-cache/[!.]*"))  # hidden files are resumed from


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("matplotlib", "plot text-run"),
        ("onnxscript", "export text-run new-onnx --format onnx"),
        ("matplotlib", "plot decode.json"),
        ("matplotlib", "plot text-run full-run"),
        ("transformers", "export text-run new-export"),
        ("tokenizers", "prepare pg19 --path books --tokenizer bpe --vocab-size 290"),
        ("tokenizers", "sample books-run --tokens 1"),
        ("PIL", "prepare images --path images --cache new-cache"),
        ("PIL", "sample image-run --images image.png --keep 0.98"),
        ("tensorboard", f"{TRAIN} --train.tensorboard"),
        ("wandb", f"{TRAIN} --train.wandb project"),
    ],
)
def test_missing_package_is_reported_with_the_install_command(sandbox, package, line):
    def hide():
        for name in list(sys.modules):
            importers = (package, "transformer_vq.hf", "torch.utils.tensorboard")
            if name.startswith(importers):
                del sys.modules[name]
        sys.modules[package] = None

    found = user_error(sandbox, line, hide)
    assert "pip install" in found
    assert not (sandbox.work / "new-run").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"{TRAIN} --data.tokenizer gpt2", "gpt2 does not exist"),
        ("prepare enwik8 --path texts/0.txt --text-field body", "--text-field"),
        ("sample text-run --images image.png", "--images"),
        ("sample text-run --keep 0.7", "--keep"),
        ("sample image-run --prompt hello", "--prompt"),
        ("sample image-run --tokens 5", "--tokens"),
        ("eval text-run --protocol streaming --seq-len 8", "--seq-len"),
    ],
)
def test_options_without_effect_are_rejected(sandbox, line, named):
    assert named in user_error(sandbox, line)
    assert not (sandbox.work / "new-run").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "option",
    [
        *("--model.logit-scale", "--model.pe-wavelength", "--model.commit-coef"),
        *("--optim.grad-clip", "--optim.lr", "--optim.eps", "--model.revive-below"),
    ],
)
def test_config_numbers_must_be_finite(sandbox, option, value):
    assert f"{option} {value}" in user_error(sandbox, f"info tiny {option} {value}")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("sample text-run --temperature nan", "--temperature nan"),
        ("sample text-run --top-p nan", "--top-p nan"),
        ("sample text-run --seed -1", "--seed -1"),
        (f"sample text-run --tokens {10**30}", "--tokens"),
        (f"sample text-run --batch {10**30}", "--batch"),
        ("sample image-run --images image.png --keep nan", "--keep nan"),
        (f"eval text-run --seq-len {10**30}", "--seq-len"),
        ("eval text-run --max-tokens 0", "--max-tokens 0"),
        ("prepare pg19 --path books --vocab-size 0", "--vocab-size 0"),
    ],
)
def test_numbers_out_of_range_are_rejected_with_the_option_name(sandbox, line, named):
    assert named in user_error(sandbox, line)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("eval text-run --out old", "--out old"),
        ("sample text-run --tokens 1 --save-state old", "--save-state old"),
        ("sample image-run --images image.png --keep 0.98 --out old", "--out old"),
        ("plot text-run --out old.png", "--out old.png"),
        ("plot decode.json --out old.png", "--out old.png"),
        ("report text-run --samples 0 --out old", "--out old"),
        ("plot text-run full-run --out old.png", "--out old.png"),
    ],
)
def test_existing_files_are_replaced_only_with_overwrite(sandbox, line, named):
    old = sandbox.work / line.split(" ")[-1]
    old.write_text("old")
    found = user_error(sandbox, line)
    assert named in found
    assert "--overwrite" in found
    assert old.read_text() == "old"
    succeed(sandbox, f"{line} --overwrite")
    assert old.read_bytes() != b"old"


@pytest.mark.parametrize("name", ["/dev/null", "pipe"])
@pytest.mark.parametrize(
    "line",
    ["eval text-run --out", "sample text-run --save-state", "plot text-run --out"],
)
def test_devices_and_pipes_are_never_replaced(sandbox, line, name):
    assert name in user_error(sandbox, f"{line} {name} --overwrite")


@pytest.mark.parametrize("name", ["figure", "figure.json", "figure.txt"])
def test_plot_writes_only_png_files(sandbox, name):
    assert ".png" in user_error(sandbox, f"plot text-run --out {name}")
    assert not list(sandbox.work.glob("figure*"))


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "texts", "nothing"])
def test_load_state_accepts_only_regular_files(sandbox, name):
    assert f"--load-state {name}" in user_error(sandbox, f"sample text-run --load-state {name}")


@pytest.mark.parametrize("name", ["/dev/zero", "texts", "nothing"])
def test_prompt_file_rejects_devices_and_folders(sandbox, name):
    assert f"--prompt-file {name}" in user_error(sandbox, f"sample text-run --prompt-file {name}")


def test_prompt_file_may_be_a_pipe(sandbox):
    def write():
        if os.fork() == 0:
            (sandbox.work / "pipe").write_text("hello")
            os._exit(0)

    succeed(sandbox, "sample text-run --tokens 2 --prompt-file pipe", write)


def test_prompt_is_read_from_stdin(sandbox):
    def write():
        read, write = os.pipe()
        os.write(write, b"hello")
        os.close(write)
        os.dup2(read, 0)

    options = "sample text-run --tokens 9 --seed 0"
    (sandbox.work / "hello.txt").write_text("hello")
    from_file = succeed(sandbox, f"{options} --prompt-file hello.txt")
    assert succeed(sandbox, f"{options} --prompt-file -", write) == from_file
    assert succeed(sandbox, options) != from_file


@pytest.mark.parametrize("name", ["broken.png", "note.txt", "/dev/zero", "pipe"])
def test_unreadable_images_are_rejected_by_name(sandbox, name):
    assert name in user_error(sandbox, f"sample image-run --images {name} --keep 0.98")


def test_keep_leaves_at_least_one_row_to_generate(sandbox):
    succeed(sandbox, "sample image-run --images image.png --keep 0.9999")


@pytest.mark.parametrize("option", [f"--top-k {10**30}", "--temperature 1e-320"])
def test_sampling_accepts_extreme_but_valid_values(sandbox, option):
    most_likely = succeed(sandbox, "sample text-run --tokens 5 --temperature 0")
    out = succeed(sandbox, f"sample text-run --tokens 5 --seed 0 {option}")
    assert out == most_likely or "top-k" in option


@pytest.mark.parametrize(
    "line",
    [
        f"{TRAIN} --train.init-from ~unknown-user/x",
        f"{TRAIN} --data.cache ~unknown-user/x",
        f"{TRAIN} --out ~unknown-user/x",
        "prepare enwik8 --cache ~unknown-user/x",
        "eval text-run --out=~unknown-user/x",
    ],
)
def test_unknown_home_folders_are_rejected_and_not_created(sandbox, line):
    assert "~unknown-user/x" in user_error(sandbox, line)
    assert not list(sandbox.work.glob("~*"))


def test_xdg_cache_home_is_the_default_cache(sandbox):
    def set_variable():
        os.environ["XDG_CACHE_HOME"] = str(sandbox.work / "xdg")

    before = sorted(sandbox.home.rglob("*"))
    succeed(sandbox, "prepare text --path texts", set_variable)
    assert list(sandbox.work.glob("xdg/transformer_vq/text-*"))
    succeed(sandbox, f"{TRAIN} --train.steps 1", set_variable)
    config = json.loads((sandbox.work / "new-run" / "config.json").read_text())
    assert config["data"]["cache"] is None  # another user may have another folder
    assert sorted(sandbox.home.rglob("*")) == before


def test_home_folders_in_paths_are_expanded(sandbox):
    succeed(sandbox, "eval text-run --max-tokens 3 --out=~/result.json")
    assert (sandbox.home / "result.json").is_file()


@pytest.mark.parametrize("content", ["[1, 2]", "5", "null", '{"model": null}', "{", "[" * 5000])
@pytest.mark.parametrize("command", ["info", "resume", "eval", "sample"])
def test_runs_with_an_invalid_config_are_rejected_by_name(sandbox, command, content):
    (sandbox.work / "text-run" / "config.json").write_text(content)
    assert "text-run" in user_error(sandbox, f"{command} text-run")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train tiny --train.steps many", "--train.steps many: must be an integer"),
        ("train tiny --optim.lr fast", "--optim.lr fast: must be a number"),
        ("train tiny --optim.grad-clip no", "--optim.grad-clip no: must be a number, or None"),
        ("train tiny --optim.betas 0.9 x", "--optim.betas 0.9 x: must be 2 numbers"),
        ("train tiny --optim.betas 0.9", "--optim.betas: give 2 values"),
        ("train tiny --data.path", "--data.path: give a value"),
        ("train tiny --data.path --train.steps 1", "--data.path: give a value"),
        ("train tiny --data.path= ", "--data.path"),
        ("prepare text --path", "--path: give a value"),
        ("sample image-run --images", "--images: give a value"),
        ("train --config nothing.toml", "nothing.toml does not exist"),
        ("train --config", "--config: give a file"),
        ("train --config texts", "texts is not a run folder (no config.json)"),
        ("train --config note.txt", "note.txt is not a config file"),
        ("train --config x.toml --config y.toml", "--config: give one file"),
        ("info text-run --config my.toml", "give the run text-run or --config my.toml, not both"),
        ("info --config my.toml --model.n-cod 3", "--model.n-cod is not an option"),
        ("config tinny", "unknown preset 'tinny' (did you mean tiny?)"),
        ("runs nothing", "nothing is not a folder"),
        ("runs --sort size", "--sort size: choose one of"),
        ("report nothing", "nothing is not a run folder"),
        ("report text-run --samples 99", "--samples 99: must be at most 20"),
        ("plot text-run decode.json", "decode.json is not a run folder"),
        ("plot text-run empty-folder", "empty-folder has no metrics"),
        ("plot text-run ./text-run", "a run is given twice"),
        ("plot text-run --x tokens", "--x tokens: is for several runs"),
        ("sample text-run --tokens -5", "--tokens -5: must not be negative"),
        ("train tiny --train.compile yes", "unexpected yes after --train.compile"),
        ("train tiny --n-code 3", "--n-code is not an option (did you mean --model.n-code?)"),
        ("train tiny extra", "unexpected extra"),
        ("eval text-run --split no", "--split no: choose one of all, test, train, validation"),
        ("prepare txt", "unknown dataset 'txt' (did you mean text?); DATASET is one of"),
        ("plot", "PATH is missing"),
        ("export text-run", "is missing: New folder"),
        ("prepare text --path nothing", "nothing does not exist; give a file, a folder or a"),
        ("prepare text --path texts --tokenizer x", "x does not exist; --tokenizer must be"),
        ("prepare text --path texts --vocab-size 9", "--vocab-size"),
    ],
)
def test_messages_name_the_option_as_typed_and_the_expected_values(sandbox, line, message):
    found = user_error(sandbox, line)
    assert message in found
    assert "--data.path must" not in found


def test_long_names_are_shortened_and_control_characters_escaped(sandbox):
    assert len(user_error(sandbox, f"train {'x' * 5000}")) < 300
    assert len(user_error(sandbox, f"eval {'x' * 5000}")) < 300
    assert "\x1b" not in user_error(sandbox, "train \x1b[31m")


def test_bytes_that_are_not_utf8_are_printed_unchanged(sandbox):
    out = succeed(sandbox, "sample text-run --tokens 0 --prompt a\udcffb")
    assert out == "a\ufffdb\n"  # one byte that cannot be decoded, not an escape


@pytest.mark.parametrize(
    ("reader", "status"), [("/dev/full", 2), pytest.param(None, 0, marks=pytest.mark.slow)]
)
def test_unwritable_stdout_is_not_reported_as_a_bug(sandbox, reader, status):
    """A full disk is a user error; a closed pipe is not an error."""
    read, write = os.pipe()
    os.close(read)
    with open(write if reader is None else reader, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "transformer_vq", "info", "tiny"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == (1 if status else 0), done.stderr


def test_json_is_the_last_line_of_stdout(sandbox):
    out = succeed(sandbox, "sample text-run --tokens 3 --json")
    assert json.loads(out.splitlines()[-1])["run"] == "text-run"


@pytest.mark.slow
def test_demo_ends_with_commands_that_work(sandbox):
    out = succeed(sandbox, "demo --steps 1 --out new-run")
    assert "| Transformer-VQ, `tiny` |" in out
    assert (sandbox.work / "new-run" / "curves.png").is_file()
    figure, commands = out.partition("Figure: ")[2].split("\n", 1)
    assert figure == "new-run/curves.png"
    prefix = f"{sys.executable} -m transformer_vq "
    lines = [x.strip() for x in commands.splitlines() if x.strip().startswith(prefix)]
    assert len(lines) == 4
    for line in lines:
        typed = shlex.split(line.removeprefix(prefix), comments=True)
        ended = sandbox.run(typed)
        assert ended.status == 0, ended
