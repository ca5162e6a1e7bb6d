"""The field of a record, or the column of a table, that holds the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from transformer_vq.data.sources.base import DataError

_SHOWN_FIELDS = 12
_MAX_DEPTH = 4
_SURROGATES = re.compile("[\ud800-\udfff]")
_FIX = "fix or remove the {place}"


def choose_field(
    name: str, wanted: str | None, fields: Sequence[str], with_text: Iterable[str]
) -> str:
    """Return the field that holds the text of a file.

    wanted: the user's choice; None takes "text", or the only field with text. fields: all fields,
    also the nested ones as dotted paths. with_text: the fields that hold text.
    Raises DataError if there is no such field.
    """
    if wanted is not None:
        if wanted in fields:
            return wanted
        close = get_close_matches(wanted, fields, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"{name} has no field {wanted!r} ({hint}its fields: {list_fields(fields)}); "
            "set --data.text-field"
        )
    if "text" in fields:
        return "text"
    candidates = list(with_text)
    if len(candidates) == 1:
        return candidates[0]
    problem = "several fields with text" if candidates else "no field with text"
    shown = list_fields(candidates or fields)
    raise DataError(f"{name} has {problem} ({shown}); choose one with --data.text-field")


def list_fields(fields: Iterable[str]) -> str:
    """Return the names of fields for a message, at most the first twelve."""
    names = list(fields)
    more = ", ..." if len(names) > _SHOWN_FIELDS else ""
    return ", ".join(names[:_SHOWN_FIELDS]) + more if names else "none"


def encode_text(text: str) -> bytes:
    """Return text as UTF-8; lone surrogates, which JSON can contain, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text).encode()


class RecordText:
    """Takes the text from the JSON records of one file. The first record decides on the field.

    place: what the numbers of records count, "line" or "record".
    """

    def __init__(self, name: str, wanted: str | None, place: str = "line") -> None:
        self._name = name
        self._wanted = wanted
        self._place = place
        self._field: str | None = None

    def document(self, record: Any, number: int) -> bytes:
        """Return the text of a record, b"" for null. Raises DataError if there is none."""
        if type(record) is str:
            return encode_text(record)
        if type(record) is not dict:
            raise self.error(number, f"{_kind(record)} instead of an object with a text field")
        if self._field is None:
            self._field = self._choose(record)
        text = record.get(self._field, record)
        if type(text) is str:
            return encode_text(text)
        if text is record:  # not a field
            text = _nested(record, self._field)
            if text is record:
                shown = list_fields(record)
                raise self.error(number, f"no field {self._field!r} (its fields: {shown})")
        if text is None:
            return b""
        if isinstance(text, str):
            return encode_text(text)
        raise self.error(
            number,
            f"the field {self._field!r} is {_kind(text)}, not text",
            f"{_FIX.format(place=self._place)}, or choose another field with --data.text-field",
        )

    def error(self, number: int, problem: str, fix: str | None = None) -> DataError:
        """Return the error for one record, which names the file and the line."""
        fix = fix or _FIX.format(place=self._place)
        return DataError(f"{self._name}, {self._place} {number:,}: {problem}; {fix}")

    def _choose(self, record: dict[str, Any]) -> str:
        fields = field_names(record) if self._wanted else list(record)
        with_text = [key for key, value in record.items() if isinstance(value, str)]
        return choose_field(self._name, self._wanted, fields, with_text)


def field_names(record: dict[str, Any], depth: int = _MAX_DEPTH) -> list[str]:
    """Return the fields of a record, followed by those of nested objects as dotted paths."""
    nested = [
        f"{key}.{inner}"
        for key, value in record.items()
        if isinstance(value, dict) and depth > 1
        for inner in field_names(value, depth - 1)
    ]
    return [*record, *nested]


def _nested(record: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or the record itself if there is none."""
    value: Any = record
    for key in path.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            return record
        value = value[key]
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else "a number"
