"""JSON that is parsed value by value, so that an array of any length needs little memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

_LITERAL = 16  # characters that may be missing from a number, a literal or an escape sequence
_MAX_VALUE = 1 << 30  # characters; a quote that is never closed must not fill the memory
_ENDS = "the file ends within a value"
_decode = json.JSONDecoder().raw_decode


class JsonError(ValueError):
    """Invalid JSON in a line."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.line = line


class JsonStream:
    """A sequence of JSON values. Raises JsonError if they are not valid.

    Only one value of an array is in memory. chunks: the bytes of a UTF-8 file.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = _characters(chunks)
        self._buffer = ""
        self._at = 0
        self._lines_before = 0  # the buffer

    def peek(self) -> str:
        """Return the next character that is not white space, or "" at the end."""
        while True:
            rest = len(self._buffer)
            while self._at < rest and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < rest:
                return self._buffer[self._at]
            if not self._read():
                return ""

    def take(self, character: str) -> None:
        """Skip a character that must come next."""
        if (found := self.peek()) != character:
            raise self._error(f"{character!r} expected, not {found!r}" if found else _ENDS)
        self._at += 1

    def value(self) -> Any:
        """Return the next value, as a whole."""
        if not self.peek():
            raise self._error(_ENDS)
        while True:
            try:
                value, end = _decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if self._may_continue(error) and self._read():
                    continue
                self._at = error.pos
                raise self._error(error.msg) from None
            except (ValueError, RecursionError) as error:
                is_deep = isinstance(error, RecursionError)
                raise self._error("nested too deeply" if is_deep else str(error)) from None
            # A number at the end of the buffer may have more digits.
            if end == len(self._buffer) and self._read():
                continue
            self._at = end
            return value

    def values(self) -> Iterator[Any]:
        """Yield all remaining values."""
        while self.peek():
            yield self.value()

    def end(self) -> None:
        """Check that nothing follows."""
        if self.peek():
            raise self._error("more text after the array")

    def array(self) -> Iterator[Any]:
        """Yield the elements of an array, one by one."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            yield self.value()
            if self.peek() == "]":
                self.take("]")
                return
            self.take(",")

    def object_keys(self) -> Iterator[str]:
        """Yield the keys of an object. The caller reads each value before the next key."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            if self.peek() != '"':
                raise self._error("a key in double quotes expected")
            key: str = self.value()
            self.take(":")
            yield key
            if self.peek() == "}":
                self.take("}")
                return
            self.take(",")

    def _may_continue(self, error: json.JSONDecodeError) -> bool:
        """Return whether a value may be invalid only because the buffer ends within it."""
        n = len(self._buffer)
        return n < _MAX_VALUE and ("Unterminated" in error.msg or error.pos > n - _LITERAL)

    def _read(self) -> bool:
        """Read more, at least as much as is in the buffer; return whether there was more.

        The buffer doubles, so a long value is parsed only a few times.
        """
        rest = self._buffer[self._at :]
        new: list[str] = []
        n_new = 0
        try:
            while n_new <= len(rest) and (text := next(self._chunks, "")):
                new.append(text)
                n_new += len(text)
        except UnicodeDecodeError as error:
            raise self._error(f"invalid UTF-8: {error.reason}") from None
        self._lines_before += self._buffer.count("\n", 0, self._at)
        self._buffer, self._at = rest + "".join(new), 0
        return n_new > 0

    def _error(self, problem: str) -> JsonError:
        line = self._lines_before + self._buffer.count("\n", 0, self._at) + 1
        return JsonError(problem, line)


def _characters(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 that is divided anywhere."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for chunk in chunks:
        if text := decoder.decode(chunk):
            yield text
    decoder.decode(b"", final=True)
