"""Helpers for the tests of data: texts, their sources, and messages of rejected data."""

from itertools import pairwise

import pytest

from transformer_vq.data.paths import DataError

CONTENT = b"".join(b"%d green bottles\n" % i for i in range(50))


def story(n_lines: int = 400) -> str:
    """Return similar but different lines."""
    who = ["the fox", "a dog", "the old man", "her sister", "no one", "the captain"]
    what = ["jumped over", "looked at", "had never seen", "walked along", "remembered"]
    return "".join(
        f"{'  ' * (i % 3)}In {1800 + i % 90} {who[i % 6]} {what[i % 5]} the lazy river.\n"
        for i in range(n_lines)
    )


def documents(corpus, split):
    """Return the bytes of each document of a split, without end-of-document tokens."""
    found, tokenizer = corpus.split(split), corpus.tokenizer()
    edges = [*found.starts, len(found)]
    return [tokenizer.decode(found[a:b].tolist()) for a, b in pairwise(edges)]


def rejection(function, *arguments):
    """Return the message of the DataError that a call raises; it must be one line."""
    with pytest.raises(DataError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def is_lossless(tokenizer, text):
    """Return whether decoding the tokens of a text gives exactly that text."""
    return tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "surrogateescape")


def cut_text(tokenizer, text):
    """Return the parts of a text, cut wherever the tokenizer allows it."""
    return [text] if tokenizer.cuts is None else [x for x in tokenizer.cuts.split(text) if x]
