"""The help of every command, and shell completion."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_cli import user_error

from transformer_vq import __version__
from transformer_vq.cli.main import COMMANDS, main
from transformer_vq.cli.output import config_fields
from transformer_vq.config import FREE_FIELDS


def printed(capsys, *arguments):
    """Return what a command prints that must exit with status 0."""
    capsys.readouterr()
    status = 0
    try:
        main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert (status or 0, captured.err) == (0, "")
    return captured.out


def listed(out):
    """Return the options that a help text explains, in order."""
    return re.findall(r"^\W*(--[a-z][a-z.-]+)", out, re.MULTILINE)


def as_options(names):
    return {f"--{name.replace('_', '-')}" for name in names}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_all_commands(arguments, capsys):
    out = printed(capsys, *arguments)
    assert out.startswith("usage: tvq COMMAND")
    for name, (_, summary) in COMMANDS.items():
        assert f"{name:<9} {summary}" in out


def test_version_is_that_of_the_package(capsys):
    assert printed(capsys, "--version") == f"tvq {__version__}\n"


@pytest.mark.parametrize("command", ["train", "train tiny --model.n-code 3", "info", "config"])
def test_help_lists_the_settings_that_people_use_and_where_all_are(capsys, command):
    short = printed(capsys, *command.split(), "--help")
    names = [name for name in listed(short) if "." in name]
    assert 10 < len(names) < 20
    assert {"--data.path", "--train.steps", "--train.init-from", "--optim.lr"} <= set(names)
    assert "--help-all" in short
    everything = listed(printed(capsys, *command.split(), "--help-all"))
    sections = [name for name in everything if "." in name]
    assert set(sections) == as_options(config_fields())
    order = dict.fromkeys(name[2:].partition(".")[0] for name in sections)
    assert list(order) == ["data", "train", "model", "optim", "parallel"]


def test_help_of_resume_lists_only_options_that_may_change(capsys):
    names = listed(printed(capsys, "resume", "--help-all"))
    assert {name for name in names if "." in name} == as_options(FREE_FIELDS)


def test_help_and_usage_errors_do_not_import_torch(tmp_path):
    program = """
import contextlib, io, sys
import transformer_vq.cli.main as cli

assert not {"torch", "numpy", "tyro"} & sys.modules.keys()
lines = [[name, "--help"] for name in cli.COMMANDS]
errors = [["trian"], ["train"], ["train", "tinny"], ["train", "tiny", "--x"], ["eval"]]
errors += [["info", "--config", "no.toml"], ["train", "tiny", "--data.path"]]
errors += [["runs", "nothing"], ["plot"], ["sample", "run", "--tokens", "-1"]]
for line in [["--help"], ["--version"], ["runs"], ["config", "tiny"], *lines, *errors]:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line)
        except SystemExit as stop:
            status = stop.code or 0
    assert status == (2 if line in errors else 0), (line, status, err.getvalue())
    assert (out.getvalue() == "") == (line in errors), (line, out.getvalue())
    assert not {"torch", "numpy"} & sys.modules.keys(), line
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_choices_and_files(capsys, tmp_path):
    expected = {
        "tvq tr": {"train"},
        "tvq train tiny --model.n-c": {"--model.n-code"},
        "tvq train tiny --model.head-type ": {"shga", "mqa", "mha", "gqa"},
        "tvq resume run --train.e": {"--train.eval-every", "--train.eval-tokens"},
        "tvq runs --sort ": {"time", "loss", "step", "name"},
        "tvq plot run --out my-": {"my-file"},
        "tvq eval my-": set(),  # bash itself completes file names
    }
    (tmp_path / "script").write_text(printed(capsys, "--print-completion", "bash"))
    (tmp_path / "my-file").touch()
    lines = ["source ./script", "complete -p tvq"]
    for line in expected:
        words = line.split(" ")
        lines.append(f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}; _tvq")
        lines.append('echo "${COMPREPLY[*]}"')
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
    )
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first == "complete -o default -F _tvq tvq"
    assert dict(zip(expected, (set(x.split()) for x in rest), strict=True)) == expected


def test_zsh_has_a_completion_script_and_other_shells_are_rejected(capsys):
    script = printed(capsys, "--print-completion", "zsh")
    assert script.startswith("#compdef tvq")
    for shell in (["csh"], []):
        line = user_error(capsys, "--print-completion", *shell)
        assert line == "tvq: --print-completion: choose one of bash, zsh"
