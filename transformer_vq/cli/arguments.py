"""Command lines by tyro, with every mistake told in one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from transformer_vq.config import RunConfig
from transformer_vq.config.checks import shown
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


def check_can_read(option: str, path: Path | None) -> None:
    """Fail before a file is opened that is not there, or that may block or never end."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; give a file")
    if not path.exists():
        raise UsageError(f"{option} {path}: does not exist; give a file")
    if not path.is_file():
        raise UsageError(f"{option} {path}: is a device or pipe; give a regular file")


def check_range(option: str, value: int | None, low: int, high: int = 2**40) -> None:
    """Reject numbers that no run could use; None means that the option is not given."""
    if value is not None and value < low:
        limit = f"be at least {low}" if low else "not be negative"
        raise UsageError(f"{option} {shown(value)}: must {limit}")
    if value is not None and value > high:
        raise UsageError(f"{option} {shown(value)}: must be at most {high}")


def check_unused(kind: str, given: dict[str, object], defaults: dict[str, object]) -> None:
    """Reject options that this kind of run would ignore."""
    for name, value in given.items():
        if value != defaults[name]:
            raise UsageError(f"--{name.replace('_', '-')} does not apply to a run on {kind}")


def parse(kind: type[T], arguments: list[str], prog: str, default: T | None = None) -> T:
    """Options by tyro; what it would draw as a box becomes one line."""
    box = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(box):
            command, unknown = tyro.cli(
                kind, args=arguments, prog=f"tvq {prog}", return_unknown_args=True, **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _config_error(stop) or UsageError(_one_line(box.getvalue(), arguments)) from None
    if unknown:
        message = _unexpected(unknown, arguments, _options(kind))
        raise UsageError(f"{message}; --help lists the options")
    return _with_home_folders(command)


def _with_home_folders(command: T) -> T:
    """Expand ~ in paths, which a shell leaves alone in `--out=~/x`."""
    found: dict[str, Path] = {}
    for name, value in vars(command).items():
        if isinstance(value, Path):
            found[name] = Path(os.path.expanduser(value))
            if str(found[name]).startswith("~"):
                raise UsageError(f"{value}: there is no such home folder; give a full path")
    return replace(command, **found)  # type: ignore[type-var]


def _config_error(stop: BaseException) -> UserError | None:
    """The error of a config, whose message names the field and the fix, if that is the cause."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _one_line(box: str, arguments: list[str]) -> str:
    """The text of an error box in the form that all messages have, as far as it is known."""
    lines = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()[1:]]
    lines = [line for line in lines if line.strip("─-")]
    text = " ".join(line for line in lines if not line.startswith("For full helptext"))
    if found := re.match(r"Error parsing (--\S+): .*Argument helptext: \1 (.*)", text):
        return _wrong_type(found[1], found[2], arguments)
    if found := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. .*\((.*)\)", text):
        choices = ", ".join(sorted(re.findall(r"'(.*?)'", found[3])))
        name = found[2] if found[2][0] == "-" else found[2].upper()
        return f"{name} {_typed([found[1]])}: choose one of {choices}"
    if found := re.match(r"Missing value for argument '(\S+)'\. Expected (\d+)", text):
        n = "a value" if found[2] == "1" else f"{found[2]} values"
        what = f"{found[1]}: give {n}" if found[1][0] == "-" else f"{found[1].upper()} is missing"
        return f"{what}; --help lists the options"
    if found := re.match(r"Missing from [^:]*: (\S+) (.*?)\.? \(required\)", text):
        return f"{found[1]} is missing: {found[2]}; --help lists the options"
    return f"{text}; --help lists the options"


def _wrong_type(option: str, help_text: str, arguments: list[str]) -> str:
    """help_text: begins with the types of the values, such as `{None}|INT`."""
    found = re.match(r"(?:[\[\]{}|. ]|None|INT|FLOAT)*", help_text)
    types = "" if found is None else found[0]
    n = types.count("INT") + types.count("FLOAT")
    noun = "whole number" if "INT" in types else "number"
    what = f"must be a {noun}" if n == 1 else f"must be {noun}s"
    if n > 1 and "..." not in types:
        what = f"must be {n} {noun}s"
    if n == 0:
        what = "is not a possible value"
    values = _given(option, arguments)
    return f"{option} {_typed(values[:1] if n == 1 else values)}: {what}" + (
        ", or None" if "None" in types else ""
    )


def _given(option: str, arguments: list[str]) -> list[str]:
    """The values after the last use of an option."""
    values: list[str] = []
    takes = False
    for argument in arguments:
        name, is_attached, value = argument.partition("=")
        if name.replace("_", "-") == option:
            values, takes = [value] if is_attached else [], True
        elif argument.startswith("--"):
            takes = False
        elif takes:
            values.append(argument)
    return values


def _unexpected(unknown: list[str], arguments: list[str], options: dict[str, Any]) -> str:
    """What to say about words that are neither options nor their values."""
    if re.match(r"-+[A-Za-z]", unknown[0]):
        name = unknown[0].partition("=")[0]
        return f"{_typed([name])} is not an option{nearest(name, options)}"
    words = list(takewhile(lambda word: not word.startswith("--"), unknown))
    before = ""
    for argument in arguments:
        name, is_attached, value = argument.partition("=")
        if argument == words[0] or (is_attached and value == words[0] and name in options):
            before = name if is_attached else before
            break
        before = argument if argument.startswith("--") else before
    hint = options.get(before.replace("_", "-").replace("no-", ""))
    after = f" after {before}" if before else ""
    if hint is bool:
        after += ", which takes no value"
    elif before.endswith("path"):
        after += ", which takes one file or folder"
    return f"unexpected {_typed(words)}{after}"


def _typed(words: list[str]) -> str:
    """Words as they are typed, long ones shortened."""
    return shlex.join(word if len(word) <= 80 else f"{word[:60]}..." for word in words[:8])


def _options(kind: Any, section: str = "") -> dict[str, Any]:
    """The options of a command by name, with their types."""
    found: dict[str, Any] = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        name = field.replace("_", "-")
        if get_origin(hint) is Annotated:
            if any(getattr(mark, "name", None) == "" for mark in hint.__metadata__):
                name = ""
            hint = hint.__origin__
        name = ".".join(filter(None, (section, name)))
        found |= _options(hint, name) if is_dataclass(hint) else {f"--{name}": hint}
    return found


def as_options(message: str) -> str:
    """Name fields as options are typed: model.n_code=0 -> --model.n-code 0, top_p=2 -> --top-p 2.

    Fields without a section are recognized at the start only.
    """
    message = _FIELDS.sub(lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)
    return re.sub(r"^([a-z]+(?:_[a-z]+)*)=", lambda m: f"--{m[1].replace('_', '-')} ", message)


def _field_names() -> str:
    hints = get_type_hints(RunConfig)
    names = [
        f"{part.name}.{f.name}" for part in fields(RunConfig) for f in fields(hints[part.name])
    ]
    return "|".join(map(re.escape, names))


_FIELDS = re.compile(rf"(?<![\w.-])({_field_names()})(?:(=)|(?![\w.=]))")
