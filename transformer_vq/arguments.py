"""Command lines by tyro, with every mistake told in one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from transformer_vq.config import RunConfig
from transformer_vq.presets import PRESETS

T = TypeVar("T")


class UsageError(ValueError):
    """A command line that cannot be understood."""


def first_word(arguments: list[str], command: str, what: str, hint: str) -> tuple[str, list[str]]:
    """The word that decides what the options mean and what their defaults are."""
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print(f"usage: tvq {command} {what} [options]\n\n{hint}\n")
            print(f"`tvq {command} {what} --help` lists the options and their defaults.")
            sys.exit(0)
        raise UsageError(f"tvq {command} needs a {what} first; {hint}")
    return arguments[0], arguments[1:]


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def find_preset(name: str) -> RunConfig:
    if name not in PRESETS:
        raise UsageError(
            f"there is no preset {name!r}{nearest(name, PRESETS)}; choose one of "
            f"{', '.join(PRESETS)}"
        )
    return PRESETS[name]


def check_can_write(option: str, path: Path | None) -> None:
    """Told before the work that ends in writing a file, not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{option} {path}: give the name of a file in a folder that exists")


def parse(kind: type[T], arguments: list[str], prog: str, default: T | None = None) -> T:
    """Options by tyro; what it would draw as a box becomes one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options: dict[str, Any] = {} if default is None else {"default": default}
            return tyro.cli(kind, args=arguments, prog=f"tvq {prog}", **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """The text of an error box up to its last section, which only points at --help."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    lines = [line for line in lines if line.strip("─")]
    text = " ".join(line for line in lines if not line.startswith("For full helptext"))
    return f"{text}; --help lists the options"
