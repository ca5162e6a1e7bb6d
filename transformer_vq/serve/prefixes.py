"""Prefix reuse: contexts of earlier prompts, found by the tokens they contain.

Contexts are stored after segments of the prefill and at the end of a prompt. A prompt that
continues from one of them is cut at the same places as without it, so the result is the same to the
last bit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from transformer_vq.generation.prefill import Context, segments


def prefix_digests(tokens: Sequence[int], start: bytes = b"") -> dict[int, bytes]:
    """Return a digest of the tokens up to the end of every segment.

    start: digest of a context that the tokens continue.
    """
    array = np.asarray(tokens, dtype=np.int64)
    running = hashlib.sha256(start)
    found = {}
    for begin, end in segments(len(array)):
        running.update(array[begin:end].tobytes())
        found[end] = running.digest()
    return found


def is_stored(end: int, ends: Sequence[int]) -> bool:
    """Return whether the context at the end of a segment is worth storing.

    These are the last two ends, and those after 1, 2, 4, 8, ... segments, which prompts with the
    same beginning share. ends: those of all segments of the prompt.
    """
    n_segments = ends.index(end) + 1
    return n_segments >= len(ends) - 1 or n_segments & (n_segments - 1) == 0


class PrefixStore:
    """The most recently used contexts by digest, within a limit of bytes in memory.

    Only the engine's thread uses it.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._contexts: OrderedDict[bytes, Context] = OrderedDict()
        self.n_bytes = 0

    def get(self, digest: bytes) -> Context | None:
        """Return a stored context and mark it as used."""
        context = self._contexts.get(digest)
        if context is not None:
            self._contexts.move_to_end(digest)
        return context

    def put(self, digest: bytes, context: Context) -> None:
        """Store a context; it must not be modified afterwards."""
        size = _size(context)
        if self.get(digest) is not None or size > self._memory_bytes:
            return
        self._contexts[digest] = context
        self.n_bytes += size
        while self.n_bytes > self._memory_bytes:
            _, evicted = self._contexts.popitem(last=False)
            self.n_bytes -= _size(evicted)


def _size(context: Context) -> int:
    return context.state.n_bytes + context.logits.nbytes
