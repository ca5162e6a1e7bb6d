"""Messages for invalid command lines: one line each, options as typed."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from itertools import takewhile
from types import NoneType
from typing import Any, get_args

LIST_HINT = "--help lists the options"


def is_flag(hint: Any) -> bool:
    """Return whether an option of this type takes no value: --option or --no-option."""
    return hint is bool or set(get_args(hint)) == {bool, NoneType}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a suggestion in parentheses if one of the names is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def tyro_error(box: str, arguments: list[str]) -> str:
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
    kinds = "" if found is None else found[0]
    n: float = kinds.count("INT") + kinds.count("FLOAT")
    n = math.inf if n and "..." in kinds else n
    article, noun = ("an", "integer") if "INT" in kinds else ("a", "number")
    what = f"must be {article} {noun}" if n == 1 else f"must be {noun}s"
    if 1 < n < math.inf:
        what = f"must be {n} {noun}s"
    if n == 0:
        what = "is not a valid value"
    values = _given(option, arguments)
    return f"{option} {_typed(values[:1] if n == 1 else values)}: {what}" + (
        ", or None" if "None" in kinds else ""
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


def unexpected_words(unknown: list[str], arguments: list[str], options: dict[str, Any]) -> str:
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
    hint = options.get(before.replace("_", "-").replace("no-", ""))
    after = f" after {before}" if before else ""
    after += ", which takes no value" if is_flag(hint) else ""
    return f"unexpected {_typed(words)}{after}; {LIST_HINT}"


def _typed(words: list[str]) -> str:
    """Return words as typed in a shell, long ones shortened."""
    return shlex.join(word if len(word) <= 80 else f"{word[:60]}..." for word in words[:8])
