"""Invalid command lines, missing packages, full disks: a short message and exit status 2."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys

import pytest
from cli_sandbox import short_message
from command_lines import TINY

TRAIN = f"train tiny {TINY} --data.path texts --out new-run"


def user_error(sandbox, line, prepare=None, **limits):
    """Run a command that must exit with status 2; return its message."""
    ended = sandbox.run(line.split(" "), prepare, **limits)
    assert ended.status == 2, ended
    return short_message(ended.err)


def succeed(sandbox, line, prepare=None):
    ended = sandbox.run(line.split(" "), prepare)
    assert ended.status == 0, ended
    return ended.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train tiny --train.steps many", "Error parsing --train.steps:"),
        ("train tiny --optim.betas 0.9", "'--optim.betas'. Expected 2 values"),
        ("train tiny --data.path --train.steps 1", "--data.path: give one value or more"),
        ("train tiny --data.path a --data.path b", "--data.path is given twice"),
        ("train tiny --n-code 3", "Unrecognized options: --n-code"),
        ("train tiny extra", "Unrecognized options: extra"),
        ("train tiny --model.n-code 0", "tvq: --model.n-code 0: must be an integer of at least 1"),
        ("train tiny --optim.lr nan", "tvq: --optim.lr nan: must be a finite number"),
        ("train tiny --data.path= ", "--data.path"),
        (f"{TRAIN} --train.device tpu", "tvq: device 'tpu' is not available"),
        ("info tiny --parallel.dp 300", "--train.batch-size"),
        (
            f"{TRAIN} --data.tokenizer gpt2",
            "No such file or directory; --data.tokenizer must be",
        ),
        ("train", "give a PRESET first, or --config FILE: tvq train PRESET"),
        ("train tiny --config", "Missing value for argument '--config'"),
        ("train --config texts", "texts is not a run folder (no config.json)"),
        ("info text-run --config my.toml", "give the run text-run or --config my.toml, not both"),
        ("info --config my.toml --model.n-cod 3", "Perhaps you meant: --model.n-code"),
        ("config tinny", "unknown preset 'tinny' (did you mean tiny?)"),
        ("resume --json", "Missing from tvq resume: RUN"),
        ("resume --json text-run", "give RUN first: tvq resume RUN"),
        ("runs nothing", "nothing is not a folder"),
        ("runs --sort size", "'--sort'. Expected one of ('time', 'loss', 'step', 'name')"),
        ("plot", "give a run folder: tvq plot RUN"),
        ("plot nothing", "nothing is not a run folder"),
        ("plot text-run empty-folder", "empty-folder has no metrics"),
        ("plot text-run --x tokens", "--x tokens: is for several runs"),
        ("plot text-run --out figure.json", "use a name ending in .png"),
        ("eval text-run --split no", "'--split'. Expected one of"),
        ("eval text-run --protocol streaming --seq-len 8", "--seq-len does not apply"),
        (f"eval text-run --seq-len {10**30}", "tvq: --seq-len 1"),
        ("export text-run", "Missing from tvq export: FOLDER"),
        ("convert texts --out new-run", "texts is not a folder of Hugging Face (no config.json)"),
        ("convert texts --out new-run --n-sink -1", "--n-sink -1: must be"),
        ("convert note.txt --out new-run", "note.txt is not a readable GGUF file"),
        ("convert nothing --out new-run", "nothing does not exist; give a folder"),
        ("export text-run new-export --license a:b", "--license 'a:b': give a name"),
        ("prepare txt", "invalid choice 'txt'"),
        ("prepare text --path nothing", "nothing does not exist; give a file, a folder or a"),
        (
            "prepare text --path texts --tokenizer x",
            "No such file or directory; --tokenizer must be",
        ),
        ("prepare text --path texts --vocab-size 9", "--vocab-size"),
        ("prepare enwik8 --path texts/0.txt --text-field body", "--text-field"),
        ("sample text-run --tokens -5", "tvq: --tokens -5: must be an integer of at least 0"),
        ("sample text-run --temperature nan", "--temperature nan"),
        (f"sample text-run --batch {10**30}", "--batch"),
        ("sample image-run --images image.png --keep nan", "--keep nan"),
        ("sample text-run --images image.png", "--images does not apply to text runs"),
        ("sample image-run --prompt hello", "--prompt does not apply to image runs"),
        ("sample image-run --images note.txt --keep 0.98", "note.txt"),
        ("sample text-run --top-p 0", "--top-p 0.0"),
        ("sample text-run --prompt a --prompt-file b", "not both"),
        ("sample text-run --save-state nothing/state", "an existing folder"),
        ("sample text-run --load-state nothing", "nothing"),
        ("serve text-run --port 0 --api-key=", "--api-key"),
        ("serve text-run --port 0 --api-key=a\nb", "--api-key"),
        ("serve text-run --port 0 --allow-hosts=http://example.org", "--allow-hosts"),
        ("serve text-run --port 0 --client-timeout=nan", "--client-timeout"),
        ("sample text-run --prompt-file texts", "cannot use texts: Is a directory"),
        ("train \x1b[31m", "unknown preset"),
    ],
)
def test_messages_name_the_option_as_typed(sandbox, line, message):
    found = user_error(sandbox, line)
    assert message in found
    assert len(found) < 900
    assert found.isprintable()
    assert not (sandbox.work / "new-run").exists()


def test_out_of_memory_suggests_options(sandbox):
    large = "--model.d-model 256 --train.batch-size 512 --train.seq-len 64 --train.backprop-len 64"
    line = user_error(sandbox, f"{TRAIN} {large} --train.steps 1", memory_gb=0.5)
    assert line.startswith("tvq: out of memory")
    assert "--train.batch-size" in line
    line = user_error(sandbox, "sample text-run --tokens 2 --batch 4000000", memory_gb=0.5)
    assert line.startswith("tvq: out of memory")
    assert "--batch" in line


@pytest.mark.parametrize(
    "line",
    [
        "export text-run new-export",
        "sample text-run --tokens 1 --save-state new-state",
        "plot text-run --out new.png",
        "prepare text --path texts --cache new-cache",
    ],
)
def test_full_disk_is_one_error_line_and_leaves_no_files(sandbox, line):
    user_error(sandbox, line, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
    assert not list(sandbox.work.glob("new[-.]*")) or "cache" in line
    assert not list(sandbox.work.glob("new-cache/[!.]*"))  # hidden files are resumed from


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("matplotlib", "plot text-run"),
        ("transformers", "export text-run new-export"),
        ("tokenizers", "sample books-run --tokens 1"),
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

    assert "pip install" in user_error(sandbox, line, hide)
    assert not (sandbox.work / "new-run").exists()


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("sample text-run --tokens 1", "--save-state old"),
        ("sample image-run --images image.png --keep 0.98", "--out old"),
        ("plot text-run full-run", "--out old.png"),
    ],
)
def test_existing_files_are_replaced_only_with_overwrite(sandbox, line, option):
    old = sandbox.work / option.split(" ")[-1]
    old.write_text("old")
    found = user_error(sandbox, f"{line} {option}")
    assert option in found
    assert "--overwrite" in found
    assert old.read_text() == "old"
    succeed(sandbox, f"{line} {option} --overwrite")
    assert old.read_bytes() != b"old"


def test_prompt_is_read_from_a_pipe_or_stdin(sandbox):
    def write():
        read, write = os.pipe()
        os.write(write, b"hello")
        os.close(write)
        os.dup2(read, 0)

    options = "sample text-run --tokens 9 --seed 0"
    (sandbox.work / "hello.txt").write_text("hello")
    from_file = succeed(sandbox, f"{options} --prompt-file hello.txt")
    assert succeed(sandbox, f"{options} --prompt-file -", write) == from_file
    assert succeed(sandbox, f"{options} --prompt-file /dev/fd/0", write) == from_file
    assert succeed(sandbox, options) != from_file


@pytest.mark.parametrize("key", ["", "\u00fc"])
def test_key_in_the_environment_is_checked(sandbox, key):
    line = "serve text-run --port 0"
    assert "TVQ_API_KEY" in user_error(sandbox, line, lambda: os.environ.update(TVQ_API_KEY=key))


def test_xdg_cache_home_is_the_default_cache(sandbox):
    def set_variable():
        os.environ["XDG_CACHE_HOME"] = str(sandbox.work / "xdg")

    before = sorted(sandbox.home.rglob("*"))
    succeed(sandbox, f"{TRAIN} --train.steps 1", set_variable)
    assert list(sandbox.work.glob("xdg/transformer_vq/text-*"))
    config = json.loads((sandbox.work / "new-run" / "config.json").read_text())
    assert config["data"]["cache"] is None  # another user may have another folder
    assert sorted(sandbox.home.rglob("*")) == before


def test_home_folders_in_paths_are_expanded(sandbox):
    succeed(sandbox, "plot text-run --out=~/result.png")
    assert (sandbox.home / "result.png").is_file()


@pytest.mark.parametrize("command", ["info", "resume", "eval", "sample"])
def test_runs_with_an_invalid_config_are_rejected_by_name(sandbox, command):
    for content in ("[1, 2]", "null", '{"model": null}', "{", "[" * 5000):
        (sandbox.work / "text-run" / "config.json").write_text(content)
        assert "text-run" in user_error(sandbox, f"{command} text-run")


def test_bytes_that_are_not_utf8_are_printed_unchanged(sandbox):
    out = succeed(sandbox, "sample text-run --tokens 0 --prompt a\udcffb")
    assert out == "a\ufffdb\n"  # one byte that cannot be decoded, not an escape


@pytest.mark.slow
@pytest.mark.parametrize("command", ["info tiny", "train --help"])
@pytest.mark.parametrize(("reader", "status"), [("/dev/full", 2), (None, 0)])
def test_unwritable_stdout_is_not_reported_as_a_bug(command, reader, status):
    """A full disk is a user error; a closed pipe is not an error."""
    read, write = os.pipe()
    os.close(read)
    with open(write if reader is None else reader, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "transformer_vq", *command.split()],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == (1 if status else 0), done.stderr


@pytest.mark.slow
def test_demo_ends_with_commands_that_work(sandbox):
    out = succeed(sandbox, "demo --steps 1 --out new-run")
    assert "Bits per byte of the test split" in out
    assert (sandbox.work / "new-run" / "curves.png").is_file()
    figure, commands = out.partition("Figure: ")[2].split("\n", 1)
    assert figure == "new-run/curves.png"
    lines = [x.strip().partition("  # ")[0] for x in commands.splitlines() if "  # " in x]
    assert len(lines) == 4
    for line in lines:
        typed = shlex.split(line.removeprefix(f"{sys.executable} -m transformer_vq"))
        ended = sandbox.run(typed[typed[0] == "tvq" :])
        assert ended.status == 0, ended
