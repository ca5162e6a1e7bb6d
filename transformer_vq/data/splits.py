"""Divides documents between training, validation and test, by a hash of their content.

Documents are sorted by their digest. The last bytes in this order are for test, those before them
for validation. The same documents therefore give the same splits, whatever format, file or order
they are stored in.
"""

from __future__ import annotations

import numpy as np

from transformer_vq.data.corpora import Source
from transformer_vq.data.documents import FREE, count_words
from transformer_vq.data.tokenizers import ByteTokenizer, Tokenizer

EDGE_TOLERANCE = 0.25  # of the smaller of validation and test
_READ_TOKENS = 1 << 20


def find_edges(source: Source, sizes: np.ndarray) -> tuple[int, int]:
    """Return where validation and test start, in bytes. sizes: of all documents, in their order.

    An edge moves to the nearest boundary between two documents if there is one close to it.
    Otherwise it divides a document.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    known = source.find_edges(len(sizes), total)
    if known is not None:
        return known
    validation, test = source.shares
    tolerance = EDGE_TOLERANCE * min((x for x in source.shares if x > 0), default=0.0) * total
    found = []
    for edge in (round(total * (1 - validation - test)), round(total * (1 - test))):
        i = int(np.searchsorted(ends, edge))
        nearest = min(ends[max(i - 1, 0) : i + 1].tolist(), key=lambda end: abs(end - edge))
        found.append(nearest if abs(nearest - edge) <= tolerance else edge)
    return found[0], found[1]


def training_bytes(source: Source, rows: np.ndarray) -> np.ndarray:
    """Return how many bytes of each document belong to the training split, [m]."""
    training = rows["bytes"].copy()
    free = np.flatnonzero((rows["split"] == FREE) & (training > 0))
    free = free[np.argsort(rows["digest"][free], kind="stable")]
    if len(free):
        sizes = training[free]
        edge = find_edges(source, sizes)[0]
        training[free] = np.clip(edge - (np.cumsum(sizes) - sizes), 0, sizes)
    return training


def divide_documents(
    source: Source, tokenizer: Tokenizer, rows: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the rows with their splits, ordered by split and digest; one at an edge is divided.

    tokens: of all documents.
    """
    free = rows[rows["split"] == FREE]
    free = free[np.argsort(free["digest"], kind="stable")]
    if len(free):
        edges = find_edges(source, free["bytes"])
        free["split"] = 0
        for split, edge in enumerate(edges, start=1):
            ends = np.cumsum(free["bytes"])
            i = int(np.searchsorted(ends, edge, side="right"))  # the document with the edge
            n_before = edge - int(ends[i - 1]) if i else edge
            if i < len(free) and n_before > 0:
                parts = _cut(free[i], n_before, tokenizer, tokens)
                free = np.concatenate([free[:i], parts, free[i + 1 :]])
                i += 1
            free["split"][i:] = split
    rows = np.concatenate([rows[rows["split"] != FREE], free])
    return rows[np.lexsort((rows["offset"], rows["digest"], rows["split"]))]


def _cut(row: np.void, at: int, tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Divide a document after `at` bytes: return the rows of its start and its end.

    It is divided between two tokens, so the start may be a few bytes longer; then there may be no
    end.
    """
    n_tokens = n_bytes = n_words = 0
    in_word = False
    while n_bytes < at and n_tokens < row["tokens"]:
        first = int(row["offset"]) + n_tokens
        some = tokens[first : first + min(_READ_TOKENS, int(row["tokens"]) - n_tokens)].tolist()
        if isinstance(tokenizer, ByteTokenizer):
            sums = np.arange(1, len(some) + 1)
        else:
            sums = np.cumsum([len(tokenizer.decode([token])) for token in some])
        n = min(int(np.searchsorted(sums, at - n_bytes)) + 1, len(some))
        more, in_word = count_words(tokenizer.decode(some[:n]), in_word)
        n_tokens, n_bytes, n_words = n_tokens + n, n_bytes + int(sums[n - 1]), n_words + more
    if n_bytes >= row["bytes"]:
        return np.array([row])
    start, end = row.copy(), row.copy()
    for name, value in (("tokens", n_tokens), ("bytes", n_bytes), ("words", n_words)):
        start[name] = min(value, row[name])
        end[name] -= start[name]
    end["offset"] += n_tokens
    return np.array([start, end])
