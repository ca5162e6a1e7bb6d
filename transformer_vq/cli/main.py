"""tvq: each subcommand calls one function of the library.

Results go to stdout, progress and warnings to stderr. `main` prints expected errors on one line and
exits with status 2; any other exception is a bug and shows its traceback. Commands import PyTorch
only after their arguments are parsed, so that --help and usage errors appear at once.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from transformer_vq import __version__
from transformer_vq.checks import nearest
from transformer_vq.cli.output import HELP, as_options, discard_output, one_line
from transformer_vq.config_files import ConfigFileError
from transformer_vq.errors import TrainingError, UserError, is_out_of_memory
from transformer_vq.presets import PRESETS
from transformer_vq.progress import IS_SILENT, TerminalReporter, reporting

# Name of the command -> module with its `run` function, one-line summary.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("transformer_vq.cli.train", "train a model from a preset or a config file"),
    "resume": ("transformer_vq.cli.resume", "resume a run from its newest checkpoint"),
    "eval": ("transformer_vq.cli.eval", "evaluate a run: bits per byte, word-level perplexity"),
    "sample": ("transformer_vq.cli.sample", "generate text or images"),
    "serve": ("transformer_vq.cli.serve", "serve a model: OpenAI API, and a page to try it"),
    "prepare": ("transformer_vq.cli.prepare", "tokenize a dataset; download enwik8"),
    "convert": ("transformer_vq.cli.convert", "convert a Llama, Mistral or Qwen model to a run"),
    "export": ("transformer_vq.cli.export", "export a run to Hugging Face transformers"),
    "info": ("transformer_vq.cli.info", "show parameters, FLOPs, state size and memory"),
    "config": ("transformer_vq.cli.config", "print a config file to start from"),
    "runs": ("transformer_vq.cli.runs", "list the runs in a folder"),
    "plot": ("transformer_vq.cli.plot", "plot a run, or compare several runs"),
    "demo": ("transformer_vq.cli.demo", "train a small model in minutes, check the equality"),
    "doctor": ("transformer_vq.cli.doctor", "check this installation; report for an issue"),
}
SHELLS = ("bash", "zsh")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit status: 0 success, 1 training that cannot continue, a failed check or a bug, 2 a user
    error, 130 Ctrl-C.
    Training that was stopped and saved after signal n exits with 128 + n.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Shells do not expand ~ in --out=~/run.
    home = os.path.expanduser("~")
    words = [x.replace("=~/", f"={home}/", 1) if x.startswith("--") else x for x in words]
    if IS_SILENT:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower() == "utf-8"  # then odd bytes stay as they are
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    try:
        try:
            with reporting(TerminalReporter()):
                status = _run(words[0] if words else "--help", words[1:])
        finally:
            sys.stdout.flush()
        if "transformer_vq.parallel.world" in sys.modules:
            sys.modules["transformer_vq.parallel.world"].leave(status)
        if status:
            sys.exit(status)
    except BrokenPipeError:
        discard_output()
        sys.exit(0)  # the reader has closed the pipe, as `head` does
    except (TrainingError, UserError) as error:
        status = 1 if isinstance(error, TrainingError) else 2
        _fail(str(error), status, in_file=isinstance(error, ConfigFileError))
    except OSError as error:
        discard_output()  # stdout may be what cannot be written
        is_plain = error.strerror is None or error.filename is None
        _fail(str(error) if is_plain else f"cannot use {error.filename}: {error.strerror}", 2)
    except UnicodeEncodeError as error:
        _fail(f"{error.object[:80]!r} is not valid Unicode text", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if is_out_of_memory(error):
            error.__traceback__ = None  # frees tensors in its frames
            _fail("out of memory; use a smaller model, batch or sequence length", 2)
        traceback.print_exc()
        _fail("this is a bug; please report it with the lines above", 1)


def _run(name: str, arguments: list[str]) -> int:
    """Run a command; return its exit status."""
    if name in COMMANDS:
        return import_module(COMMANDS[name][0]).run(arguments) or 0
    if name == "help" or name in HELP:
        print(_overview())
    elif name == "--version":
        print(f"tvq {__version__}")
    elif name == "--print-completion":
        if len(arguments) != 1 or arguments[0] not in SHELLS:
            raise UserError(f"--print-completion: choose one of {', '.join(SHELLS)}")
        from transformer_vq.cli.arguments import print_completion

        print_completion(arguments[0])
    else:
        raise UserError(f"unknown command {name!r}{nearest(name, COMMANDS)}; see tvq --help")
    return 0


def _fail(message: str, status: int, in_file: bool = False) -> NoReturn:
    """Print an error on one line and exit; an error in a config file names keys, not options."""
    if IS_SILENT:
        # Rank 0 reports errors that all ranks have; meanwhile torchrun terminates this rank.
        time.sleep(3)
        message = f"rank {os.environ['RANK']}: {message}"
    message = message if in_file else as_options(message)
    print(f"tvq: {one_line(message)}", file=sys.stderr)
    sys.exit(status)


def _overview() -> str:
    commands = "\n".join(f"  {name:<9} {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""\
usage: tvq COMMAND ...

Transformer-VQ: transformers with dense softmax attention in linear time.

{commands}

presets: {", ".join(PRESETS)}
To get started: tvq sample books --prompt "It was"; tvq train tiny --out my-run
Options of a command: tvq COMMAND --help
Version: tvq --version
Shell completion in bash: source <(tvq --print-completion bash)"""
