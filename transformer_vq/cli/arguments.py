"""Parse command lines with tyro, and report every mistake on one line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import sys
import types
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from transformer_vq.checks import shown
from transformer_vq.cli.messages import LIST_HINT, tyro_error, unexpected_words
from transformer_vq.cli.messages import nearest as nearest
from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS

T = TypeVar("T")
MAX_ROWS = 2**24  # as in the run config
PRESET_HINT = f"PRESET is one of {', '.join(PRESETS)}"
RUN_HINT = "RUN is a run folder, or books, the model in the package"
HELP = frozenset({"-h", "--help", "--help-all"})
COMMON_FIELDS = frozenset(
    {
        *("data.dataset", "data.path", "data.tokenizer"),
        *("train.steps", "train.batch_size", "train.seq_len", "train.init_from"),
        *("train.device", "train.precision", "train.seed"),
        *("model.d_model", "model.n_layer", "model.head_type"),
        *("optim.lr", "optim.warmup"),
    }
)
"""Fields of a run config that --help shows; --help-all shows all."""
MORE_HELP = (
    "Use --help-all for all settings, --help for those that are used most; `tvq config tiny` "
    "prints them as a file."
)


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
    if not HELP & set(arguments):
        raise UsageError(f"{command} needs a {what} first; {hint}")
    if options is not None:
        note = f"{hint}."
        if example is not None:
            note += f" Defaults that depend on {what} are shown for the preset tiny."
        parse(options, arguments, f"{command} {what}", example, note, hidden)
    print(f"usage: tvq {command} {what} [options]\n\n{hint}\n")
    print(f"`tvq {command} {what} --help` lists the options and their defaults.")
    sys.exit(0)


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

    if given := HELP & set(arguments):
        if has_run_config(kind):
            note = f"{note} {MORE_HELP}".strip()
            if "--help-all" not in given:
                hidden = {*hidden, *(config_fields() - COMMON_FIELDS)}
        arguments = ["--help"]
    arguments = _merged(arguments, option_types(kind))
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
        raise _config_error(stop) or UsageError(tyro_error(box.getvalue(), arguments)) from None
    if fixed := [name for name in map(_field_name, unknown) if name in hidden]:
        named = ", ".join(f"{name} ({_field(default, name)})" for name in fixed)
        raise UsageError(
            f"{named} cannot change when a run is resumed; resume without these options, or start "
            "a new run from its weights (--train.init-from)"
        )
    if unknown:
        raise UsageError(unexpected_words(unknown, arguments, option_types(kind)))
    parsed: T = _with_home_folders(options)
    return parsed


def _merged(arguments: list[str], options: dict[str, Any]) -> list[str]:
    """Join the values of options that take any number of them and are given several times.

    tyro would use only the last: --path a --path b -> --path a b. Raises UsageError if a file or
    another text is missing, for example because a shell variable is empty.
    """
    groups: dict[object, list[str]] = {"": []}
    group = groups[""]
    for number, argument in enumerate(arguments):
        if not re.match(r"-+[A-Za-z]", argument):
            group.append(argument)
            continue
        name, is_attached, value = argument.partition("=")
        name = name.replace("_", "-")
        if value_type(options.get(name)) is not None:
            group = groups.setdefault(name, [name])
            group += [value] if is_attached else []
        else:
            group = groups[number] = [argument]
    for option, words in groups.items():
        is_text = option in options and value_type(options[str(option)]) in (str, Path)
        if is_text and len(words) == 1:
            raise UsageError(f"{option}: give a value; {LIST_HINT}")
    return [word for words in groups.values() for word in words]


def value_type(hint: Any) -> Any:
    """Return the type of the values if an option takes any number of them, else None."""
    if get_origin(hint) in (Union, types.UnionType):
        return next((x for x in map(value_type, get_args(hint)) if x is not None), None)
    is_tuple = get_origin(hint) is tuple and get_args(hint)[1:] == (...,)
    inner = get_args(hint)[0] if is_tuple else None
    return get_args(inner)[0] if get_origin(inner) is Annotated else inner


def _with_home_folders(options: T) -> T:
    """Expand ~ in paths, which shells do not expand in `--out=~/x`."""
    found: dict[str, Any] = {}
    for name, value in vars(options).items():
        if isinstance(value, Path):
            found[name] = expand_home(value)
        elif isinstance(value, tuple) and any(isinstance(x, Path) for x in value):
            found[name] = tuple(map(expand_home, value))
    return replace(options, **found)  # type: ignore[type-var]


def expand_home(path: Path) -> Path:
    """Return a path with ~ expanded; raise UsageError if the home folder is not known."""
    expanded = Path(os.path.expanduser(path))
    if str(expanded).startswith("~"):
        raise UsageError(f"{path}: home folder not found; give a full path")
    return expanded


def _config_error(stop: BaseException) -> UserError | None:
    """Return the error that a config raised while tyro built it, if there is one."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _field_name(option: str) -> str:
    """Return the field of a run config that an option sets: --model.n-code 3 -> model.n_code."""
    name = option.partition("=")[0].removeprefix("--").replace("-", "_")
    return name.replace(".no_", ".")


def _field(options: Any, name: str) -> str:
    """Return the value of a field of the run config in the options."""
    section, _, field = name.partition(".")
    return shown(getattr(getattr(options.run, section), field))


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


def has_run_config(kind: Any) -> bool:
    """Return whether a command has all settings of a run as options."""
    return "--model.n-code" in option_types(kind)


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
