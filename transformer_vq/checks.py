"""Check dataclass fields against their annotations; every error is one line with the fix.

Fields may be int, float, bool, str, a Literal, a tuple, another class, or one of these or None.
`Annotated[int, Range(1, 8)]` limits a number. Configs and options of commands are checked here
only, whether they are built in Python, from a file or from the command line.
"""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from transformer_vq.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers from low to high; `below` excludes high."""

    low: float = -math.inf
    high: float = math.inf
    below: bool = False


def check_fields(config: object, part: str = "") -> None:
    """Raise UserError if a field does not hold what its annotation says.

    part: the name of the config in front of the fields, such as "model" for `model.n_code`.
    """
    kind: Any = type(config)
    for name, hint in _hints(kind).items():
        value = getattr(config, name)
        if (wrong := _problem(hint, value)) is not None:
            raise UserError(f"{_name(part, name)}={shown(value)}: {wrong}")


def from_plain(kind: type[T], values: object, part: str = "") -> T:
    """Build a dataclass from JSON values, which may be anything; raise UserError if they are wrong.

    Lists become tuples where the field is a tuple, objects the dataclass of their field.
    """
    if not isinstance(values, dict):
        raise UserError(f"the {part or 'run'} config must be a JSON object, not {shown(values)}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    found = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"{_name(part, name)} is not an option{nearest(name, hints)}")
        if is_dataclass(hints[name]):
            value = from_plain(hints[name], value, name)
        elif get_origin(hints[name]) is tuple and isinstance(value, list):
            value = tuple(value)
        found[name] = value
    for field in fields(kind):  # type: ignore[arg-type]
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in found:
            raise UserError(f"{_name(part, field.name)} is missing from the config")
    return kind(**found)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a suggestion in parentheses if one of the names is similar, else an empty string."""
    close = get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def shown(value: object) -> str:
    """Return any value as a short text in one line."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    return " ".join(short.repr(value).split())


def _name(part: str, name: str) -> str:
    return f"{part}.{name}" if part else name


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _problem(hint: Any, value: Any) -> str | None:
    """Return what is wrong with a value of this type, or None."""
    limits = Range()
    if get_origin(hint) is Annotated:
        limits = next((x for x in hint.__metadata__ if isinstance(x, Range)), limits)
        hint = hint.__origin__
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        is_valid = any(_problem(x, value) is None for x in arguments)
        return None if is_valid else f"{_problem(arguments[0], value)}, or None"
    if origin is Literal:
        is_valid = isinstance(value, str) and value in arguments
        return None if is_valid else f"choose one of {', '.join(arguments)}"
    if origin is tuple:
        if not isinstance(value, tuple):
            return "must be a list of values"
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(value) != len(kinds):
            return f"must be a list of {len(kinds)} values"
        problems = map(_problem, kinds, value)
        return next((f"each {text}" for text in problems if text is not None), None)
    if hint in (int, float):
        kind = "an integer" if hint is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int if hint is int else (int, float)):
            return f"must be {kind}"
        if not -math.inf < value < math.inf:
            return "must be a finite number"
        if value < limits.low:
            return f"must be {kind} of at least {limits.low:.15g}"
        if value > limits.high or (limits.below and value == limits.high):
            end = "below" if limits.below else "of at most"
            return f"must be {kind} {end} {limits.high:.15g}"
        return None
    if not isinstance(value, hint):
        names = {bool: "true or false", str: "text"}
        return f"must be {names.get(hint, f'a {hint.__name__}')}"
    return "must not be empty" if value == "" else None
