"""Check dataclass fields against their annotations; every error is one line with the fix.

Fields may be int, float, bool, str, a Literal, a tuple, another dataclass, or one of these or None.
`Annotated[int, Range(1, 8)]` limits a number.
"""

from __future__ import annotations

import math
import os
import reprlib
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from transformer_vq.errors import UserError

T = TypeVar("T")
Problem = Callable[[Any], str | None]  # what is wrong with a value, or None

EXACT_INT = 2**53  # above it a float cannot represent every integer


@dataclass(frozen=True)
class Range:
    """The numbers from low to high, both included unless `above` or `below` excludes them."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def problem(self, value: float, kind: str) -> str | None:
        too_high = value > self.high or (self.below and value == self.high)
        if too_high and self.high > 1:
            return f"must be {kind} of at most {_number(self.high)}"
        if too_high or value < self.low or (self.above and value == self.low):
            return self.describe(kind)
        return None

    def describe(self, kind: str) -> str:
        """Leave out a high limit that is out of the way: it is not what the user got wrong."""
        text = f"must be {kind}"
        if self.low > -math.inf:
            text += " above " if self.above else " of at least "
            text += _number(self.low)
        if self.high <= 1:
            text += f" and {'below' if self.below else 'at most'} {_number(self.high)}"
        return text


def check_fields(config: object, part: str = "") -> None:
    """Raise UserError if a field does not hold what its annotation says.

    part: the name of the config in front of the fields, such as "model" for `model.n_code`.
    """
    kind: Any = type(config)
    for name, problem in _problems(kind).items():
        value = getattr(config, name)
        if (wrong := problem(value)) is not None:
            raise UserError(f"{_name(part, name)}={shown(value)}: {wrong}")


def from_plain(kind: type[T], values: object, part: str = "") -> T:
    """Build a dataclass from JSON values, which may be anything; raise UserError if they are wrong.

    Lists become tuples where the field is a tuple, objects the dataclass of their field.
    """
    if not isinstance(values, dict):
        what = f"the {part or 'run'} config"
        raise UserError(f"{what} must be a JSON object of options and values, not {shown(values)}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    for name in values:
        if name not in hints:
            close = get_close_matches(name, hints, n=1) if isinstance(name, str) else []
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"{shown(name)} is not an option of the {part or 'run'} config{hint}")
    for field in fields(kind):  # type: ignore[arg-type]
        no_default = field.default is MISSING and field.default_factory is MISSING
        if no_default and field.name not in values:
            raise UserError(f"{_name(part, field.name)} is missing from the config")
    found = {}
    for name, value in values.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            value = from_plain(hint, value, name)
        elif get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        found[name] = value
    return kind(**found)


def _name(part: str, name: str) -> str:
    return ".".join(x for x in (part, name) if x)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python cannot print integers with thousands of digits.
        return repr(x) if abs(x) < 10**30 else f"<integer of {x.bit_length()} bits>"


def shown(value: object) -> str:
    """Return any value as a short text in one line."""
    return " ".join(_Shown().repr(value).split())


def _number(x: float) -> str:
    return str(x) if isinstance(x, int) else f"{x:g}"


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _problems(kind: type) -> dict[str, Problem]:
    return {name: _problem(hint) for name, hint in _hints(kind).items()}


def _problem(hint: Any) -> Problem:
    """Return the function that finds what is wrong with a value of this type."""
    limits = Range(-math.inf, math.inf)
    if get_origin(hint) is Annotated:
        limits = next((x for x in hint.__metadata__ if isinstance(x, Range)), limits)
        hint = hint.__origin__
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _optional(*(_problem(x) for x in arguments if x is not types.NoneType))
    if origin is Literal:
        choices = f"choose one of {', '.join(arguments)}"
        return lambda x: None if isinstance(x, str) and x in arguments else choices
    if origin is tuple and arguments[1:] == (...,):
        return _any_tuple(_problem(arguments[0]))
    if origin is tuple:
        return _fixed_tuple([_problem(x) for x in arguments])
    if hint is int:
        return lambda x: _integer_problem(x, limits)
    if hint is float:
        return lambda x: _number_problem(x, limits)
    if hint is bool:
        return lambda x: None if isinstance(x, bool) else "must be true or false"
    if hint is str:
        return _text_problem
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda x: None if isinstance(x, hint) else f"must be a {hint.__name__}"
    raise TypeError(f"no check for fields of type {hint}")


def _optional(problem: Problem) -> Problem:
    def wrong(value: Any) -> str | None:
        text = None if value is None else problem(value)
        return text if text is None or text.startswith("must not") else f"{text}, or None"

    return wrong


def _fixed_tuple(problems: list[Problem]) -> Problem:
    def wrong(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(problems):
            return f"must be a tuple of {len(problems)} values"
        found = (problem(x) for problem, x in zip(problems, value, strict=True))
        return next((f"each {text}" for text in found if text is not None), None)

    return wrong


def _any_tuple(problem: Problem) -> Problem:
    def wrong(value: Any) -> str | None:
        if not isinstance(value, tuple):
            return "must be a list of values"
        return next((f"each {text}" for x in value if (text := problem(x)) is not None), None)

    return wrong


def _integer_problem(value: Any, limits: Range) -> str | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return limits.describe("an integer")
    return limits.problem(value, "an integer")


def _number_problem(value: Any, limits: Range) -> str | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return limits.describe("a number")
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > EXACT_INT:
        return "must be smaller, or written with an exponent such as 1e20"
    return limits.problem(value, "a number")


def _text_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be text"
    if not value:
        return "must not be empty"
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:
        return "must be text that can be encoded as UTF-8"
    return "must not contain NUL characters" if b"\0" in encoded else None
