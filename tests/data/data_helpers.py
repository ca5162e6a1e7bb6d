"""Helpers for the tests of data: texts, their sources, and messages of rejected data."""

import numpy as np
import pytest

from transformer_vq.data.corpus import Corpus
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.text import ByteFiles, text_files

CONTENT = b"".join(b"%d green bottles\n" % i for i in range(50))


def story(n_lines: int = 400) -> str:
    """Return similar but different lines."""
    who = ["the fox", "a dog", "the old man", "her sister", "no one", "the captain"]
    what = ["jumped over", "looked at", "had never seen", "walked along", "remembered"]
    return "".join(
        f"{'  ' * (i % 3)}In {1800 + i % 90} {who[i % 6]} {what[i % 5]} the lazy river.\n"
        for i in range(n_lines)
    )


def text_source(path):
    """Return the source of a text file or folder."""
    return ByteFiles.from_files(path, text_files(path))


def documents(source, split):
    """Return the bytes of each document of a split."""
    found = []
    for part in source.chunks(split):
        assert part.tokens.dtype == np.uint8
        assert len(part.tokens) == part.n_bytes
        if part.starts_document:
            found.append(b"")
        found[-1] += part.tokens.tobytes()
    return found


def rejection(function, *arguments):
    """Return the message of the DataError that a call raises; it must be one line."""
    with pytest.raises(DataError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def open_rejection(folder):
    """Return the message with which `Corpus.open` rejects a folder; it must name the fix."""
    message = rejection(Corpus.open, folder)
    assert str(folder) in message
    assert "delete it" in message
    return message
