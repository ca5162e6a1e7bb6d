"""Shell completion scripts of `tvq --print-completion`."""

import shlex
import shutil
import subprocess

import pytest
from test_cli import user_error

from transformer_vq.cli.completion import SHELLS
from transformer_vq.cli.main import COMMANDS, main
from transformer_vq.presets import PRESETS


def script(capsys, shell):
    capsys.readouterr()
    main(["--print-completion", shell])
    return capsys.readouterr().out


def complete(capsys, line):
    """Return the words that bash offers for the last word of a line."""
    words = line.split(" ")
    program = f"""
{script(capsys, "bash")}
COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
_tvq
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@needs_bash
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tvq ", {*COMMANDS, "--help", "--version", "--print-completion"}),
        ("tvq tr", {"train"}),
        ("tvq train ", set(PRESETS)),
        ("tvq train ti", {"tiny"}),
        ("tvq info enw", {"enwik8-190m"}),
        ("tvq train tiny --model.n-c", {"--model.n-code"}),
        ("tvq train tiny --model.no-comp", {"--model.no-compressive-cache"}),
        ("tvq train tiny --model.head-type ", {"shga", "mqa", "mha", "gqa"}),
        ("tvq resume run --model.", set()),
        ("tvq resume run --train.e", {"--train.eval-every", "--train.eval-tokens"}),
        ("tvq sample run --prompt-", {"--prompt-file"}),
        ("tvq prepare ima", {"imagenet64", "images"}),
        ("tvq prepare text --data", set()),
        ("tvq config ", set(PRESETS)),
        ("tvq config tiny --format ", {"toml", "json"}),
        ("tvq train --conf", {"--config"}),
        ("tvq runs --sort ", {"time", "loss", "step", "name"}),
        ("tvq plot --", {"--out", "--x", "--overwrite", "--no-overwrite", "--help"}),
        ("tvq doctor --q", {"--quick"}),
        ("tvq --print-completion ", set(SHELLS)),
        ("tvq export run out --ch", {"--checkpoint", "--chat-template"}),
        ("tvq export run out --dtype ", {"float32", "bfloat16", "float16"}),
        ("tvq export run out --p", {"--push-to-hub", "--private"}),
    ],
)
def test_bash_completes_commands_presets_options_and_choices(capsys, line, words):
    assert complete(capsys, line) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_and_are_valid(capsys, shell, tmp_path):
    text = script(capsys, shell)
    for word in [*COMMANDS, *PRESETS, "model.n-code", "prompt-file"]:
        assert word in text
    assert text.isascii()
    if shutil.which(shell) is not None:
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([shell, "-n", str(path)], check=True)


def test_unknown_shells_are_rejected(capsys):
    assert "choose one of bash, zsh, fish" in user_error(capsys, "--print-completion", "csh")
    assert "choose one of bash, zsh, fish" in user_error(capsys, "--print-completion")
