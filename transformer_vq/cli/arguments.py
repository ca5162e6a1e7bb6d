"""Parse command lines with tyro, and report every mistake on one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from transformer_vq.config import RunConfig
from transformer_vq.config.checks import shown
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS

T = TypeVar("T")
MAX_ROWS = 2**24  # as in the run config
PRESET_HINT = f"PRESET is one of {', '.join(PRESETS)}"
LIST_HINT = "--help lists the options"
RUN_HINT = "RUN is a run folder"


class UsageError(UserError):
    """An invalid command line."""


def first_word(
    arguments: list[str],
    command: str,
    what: str,
    hint: str,
    options: type | None = None,
    example: object | None = None,
    hidden: Collection[str] = (),
) -> tuple[str, list[str]]:
    """Return the first argument, which determines the defaults of the options, and the rest.

    If it is missing, --help prints the hint and the options, with the defaults of the example.
    hidden: as in `parse`.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if not {"-h", "--help"} & set(arguments):
        raise UsageError(f"{command} needs a {what} first; {hint}")
    if options is not None:
        note = f"{hint}."
        if example is not None:
            note += f" Defaults that depend on {what} are shown for the preset tiny."
        parse(options, ["--help"], f"{command} {what}", example, note, hidden)
    print(f"usage: tvq {command} {what} [options]\n\n{hint}\n")
    print(f"`tvq {command} {what} --help` lists the options and their defaults.")
    sys.exit(0)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a suggestion in parentheses if one of the names is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def find_preset(name: str) -> RunConfig:
    """Return a preset by its name."""
    if name not in PRESETS:
        choices = ", ".join(PRESETS)
        raise UsageError(
            f"unknown preset {name!r}{nearest(name, PRESETS)}; choose one of {choices}"
        )
    return PRESETS[name]


def check_can_read(option: str, path: Path | None) -> None:
    """Raise UsageError unless the path is a regular file; opening others may block or not end."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; give a file")
    if not path.exists():
        raise UsageError(f"{option} {path}: does not exist; give a file")
    if not path.is_file():
        raise UsageError(f"{option} {path}: is a device or pipe; give a file")


def check_range(option: str, value: int | None, low: int, high: int = 2**40) -> None:
    """Raise UsageError if a number is out of range; None is accepted."""
    if value is not None and value < low:
        limit = f"be at least {low}" if low else "not be negative"
        raise UsageError(f"{option} {shown(value)}: must {limit}")
    if value is not None and value > high:
        raise UsageError(f"{option} {shown(value)}: must be at most {high}")


def check_unused(kind: str, given: dict[str, object], defaults: dict[str, object]) -> None:
    """Raise UsageError if an option is given that this kind of run ignores."""
    for name, value in given.items():
        if value != defaults[name]:
            raise UsageError(f"--{name.replace('_', '-')} does not apply to {kind} runs")


def parse(
    kind: type[T],
    arguments: list[str],
    prog: str,
    default: T | None = None,
    note: str = "",
    hidden: Collection[str] = (),
) -> T:
    """Return the options that the arguments give; raise UsageError with one line if they are wrong.

    default: options that have not been given. note: appended to the description in --help.
    hidden: fields of a run config that cannot be changed.
    """
    import tyro

    from transformer_vq.cli.help import HelpText, option_rules

    box, help_text = io.StringIO(), HelpText()  # tyro draws a box around its messages
    settings: dict[str, Any] = {} if default is None else {"default": default}
    if note:
        settings["description"] = f"{inspect.getdoc(kind)}\n\n{note}"
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(help_text):
            options, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=f"tvq {prog}",
                return_unknown_args=True,
                registry=option_rules(hidden),
                **settings,
            )
    except SystemExit as stop:
        if not stop.code:
            # Flush here, where a closed pipe is still handled.
            print(help_text.wrapped(), end="", flush=True)
            raise
        raise _config_error(stop) or UsageError(_one_line(box.getvalue(), arguments)) from None
    if fixed := [name for name in map(_field_name, unknown) if name in hidden]:
        named = ", ".join(f"{name} ({_field(default, name)})" for name in fixed)
        raise UsageError(
            f"{named} cannot change when a run is resumed; resume without these options, or start "
            "a new run from its weights (--train.init-from)"
        )
    if unknown:
        raise UsageError(_unexpected(unknown, arguments, option_types(kind)))
    parsed: T = _with_home_folders(options)
    return parsed


def _with_home_folders(options: T) -> T:
    """Expand ~ in paths, which shells do not expand in `--out=~/x`."""
    found: dict[str, Path] = {}
    for name, value in vars(options).items():
        if isinstance(value, Path):
            found[name] = Path(os.path.expanduser(value))
            if str(found[name]).startswith("~"):
                raise UsageError(f"{value}: home folder not found; give a full path")
    return replace(options, **found)  # type: ignore[type-var]


def _config_error(stop: BaseException) -> UserError | None:
    """Return the error that a config raised while tyro built it, if there is one."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _one_line(box: str, arguments: list[str]) -> str:
    """Return the message in tyro's box, rewritten in the style of all other messages."""
    # Remove the frame, which is drawn with Unicode box characters.
    lines = [line.strip("\u2502\u256d\u256e\u2570\u256f|+ ") for line in box.splitlines()[1:]]
    lines = [line for line in lines if line.strip("\u2500-")]
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
        return f"{what}; {LIST_HINT}"
    if found := re.match(r"Missing from [^:]*: (\S+) (.*?)\.? \(required\)", text):
        return f"{found[1]} is missing: {found[2]}; {LIST_HINT}"
    return f"{text}; {LIST_HINT}"


def _wrong_type(option: str, help_text: str, arguments: list[str]) -> str:
    """Return the message for a value of the wrong type.

    help_text: starts with the types of the values, such as `{None}|INT`.
    """
    found = re.match(r"(?:[\[\]{}|. ]|None|INT|FLOAT)*", help_text)
    types = "" if found is None else found[0]
    n = types.count("INT") + types.count("FLOAT")
    article, noun = ("an", "integer") if "INT" in types else ("a", "number")
    what = f"must be {article} {noun}" if n == 1 else f"must be {noun}s"
    if n > 1 and "..." not in types:
        what = f"must be {n} {noun}s"
    if n == 0:
        what = "is not a valid value"
    values = _given(option, arguments)
    return f"{option} {_typed(values[:1] if n == 1 else values)}: {what}" + (
        ", or None" if "None" in types else ""
    )


def _given(option: str, arguments: list[str]) -> list[str]:
    """Return the values after the last use of an option."""
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
    """Return the message for words that are neither options nor their values."""
    if re.match(r"-+[A-Za-z]", unknown[0]):
        name = unknown[0].partition("=")[0]
        return f"{_typed([name])} is not an option{nearest(name, options)}; {LIST_HINT}"
    words = list(takewhile(lambda word: not word.startswith("--"), unknown))
    before = ""
    for argument in arguments:
        name, is_attached, value = argument.partition("=")
        if argument == words[0] or (is_attached and value == words[0] and name in options):
            before = name if is_attached else before
            break
        before = argument if argument.startswith("--") else before
    if before.endswith("path"):  # for example, a pattern that the shell has expanded
        return f"{before} takes one file or folder, not {len(words) + 1}; put the files in a folder"
    hint = options.get(before.replace("_", "-").replace("no-", ""))
    after = f" after {before}" if before else ""
    after += ", which takes no value" if hint is bool else ""
    return f"unexpected {_typed(words)}{after}; {LIST_HINT}"


def _field_name(option: str) -> str:
    """Return the field of a run config that an option sets: --model.n-code 3 -> model.n_code."""
    name = option.partition("=")[0].removeprefix("--").replace("-", "_")
    return name.replace(".no_", ".")


def _field(options: Any, name: str) -> str:
    """Return the value of a field of the run config in the options."""
    section, _, field = name.partition(".")
    return shown(getattr(getattr(options.run, section), field))


def _typed(words: list[str]) -> str:
    """Return words as typed in a shell, long ones shortened."""
    return shlex.join(word if len(word) <= 80 else f"{word[:60]}..." for word in words[:8])


def option_types(kind: Any, section: str = "") -> dict[str, Any]:
    """Return the names of all options of a command, with their types."""
    found: dict[str, Any] = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        name = field.replace("_", "-")
        if get_origin(hint) is Annotated:
            if any(getattr(mark, "name", None) == "" for mark in hint.__metadata__):
                name = ""
            hint = hint.__origin__
        name = ".".join(filter(None, (section, name)))
        found |= option_types(hint, name) if is_dataclass(hint) else {f"--{name}": hint}
    return found


def as_options(message: str) -> str:
    """Replace field names with options: model.n_code=0 -> --model.n-code 0, top_p=2 -> --top-p 2.

    Fields without a section are recognized only at the start of the message.
    """
    names = "|".join(map(re.escape, sorted(config_fields())))
    pattern = rf"(?<![\w.-])({names})(?:(=)|(?![\w.=]))"
    message = re.sub(pattern, lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)
    return re.sub(r"^([a-z]+(?:_[a-z]+)*)=", lambda m: f"--{m[1].replace('_', '-')} ", message)


@functools.cache
def config_fields() -> frozenset[str]:
    """Return all fields of a run config, such as model.n_code."""
    hints = get_type_hints(RunConfig)
    return frozenset(
        f"{part.name}.{f.name}" for part in fields(RunConfig) for f in fields(hints[part.name])
    )
