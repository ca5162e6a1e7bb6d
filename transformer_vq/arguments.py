"""Command lines by tyro, with every mistake told in one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS

T = TypeVar("T")


class UsageError(UserError):
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


def check_can_write(option: str, path: Path | None, overwrite: bool = False) -> None:
    """Fail before the work whose result could not be written."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: give the name of a file in a folder that exists")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise UsageError(f"{option} {path}: the file exists; use --overwrite or another name")


def check_unused(kind: str, given: dict[str, object], defaults: dict[str, object]) -> None:
    """Reject options that this kind of run would ignore."""
    for name, value in given.items():
        if value != defaults[name]:
            raise UsageError(f"--{name.replace('_', '-')} does not apply to a run on {kind}")


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
    lines = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()[1:]]
    lines = [line for line in lines if line.strip("─-")]
    text = " ".join(line for line in lines if not line.startswith("For full helptext"))
    # A value that the config rejects: its own message names the field and the fix.
    if found := re.fullmatch(r"Error parsing [\w.-]+: ((\w+)\.\w+=.*)", text):
        return found[1]
    return f"{text}; --help lists the options"


def as_options(message: str) -> str:
    """Name the fields of a run's config as they are typed: model.n_code=0 -> --model.n-code 0."""
    return _FIELDS.sub(lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)


def _field_names() -> str:
    hints = get_type_hints(RunConfig)
    names = [
        f"{part.name}.{f.name}" for part in fields(RunConfig) for f in fields(hints[part.name])
    ]
    return "|".join(map(re.escape, names))


_FIELDS = re.compile(rf"(?<![\w.-])({_field_names()})(?:(=)|(?![\w.=]))")
