"""The second pass over text: tokens in shards, written as they are read, so that it can resume.

A shard is two files in the work folder: `<number>.bin` with tokens, and `<number>.npz`, written
last, with one row per fragment in it. A preparation that was interrupted keeps its complete shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_vq.data.segments import Fragment, Segment, count_words
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.files import atomic_write

SHARD_BYTES = 1 << 24  # of text
BATCH_BYTES = 1 << 18  # of text, tokenized at once
N_BATCHES = 2  # tokenized at the same time: one may wait for Python while the other computes
CHECK_EVERY = 16  # segments; the round trip of one of them is checked


class Encoded(NamedTuple):
    """The tokens of a segment, with the number of original bytes and words."""

    fragment: int
    tokens: np.ndarray
    n_bytes: int
    n_words: int


@dataclass
class RoundTrip:
    """How often decoding the tokens of a segment gave its text again."""

    checked: int = 0
    lossy: int = 0


def encode_bytes(fragments: Iterable[Fragment]) -> Iterator[Encoded]:
    """Yield fragments as byte tokens."""
    number, in_word = -1, False
    for fragment in fragments:
        n_words, in_word = count_words(fragment.data, in_word and fragment.number == number)
        number = fragment.number
        tokens = np.frombuffer(fragment.data, dtype=np.uint8)
        yield Encoded(number, tokens, len(tokens), n_words)


def encode_segments(
    found: Iterable[Segment], tokenizer: Tokenizer, round_trip: RoundTrip
) -> Iterator[Encoded]:
    """Tokenize segments in batches, on all cores, in order."""

    def encode(batch: list[Segment]) -> list[Encoded]:
        tokens = tokenizer.encode_batch([segment.text for segment in batch])
        texts = [segment.text.encode() for segment in batch]
        words = [count_words(text)[0] for text in texts]
        numbers = [segment.fragment for segment in batch]
        return [
            Encoded(*values) for values in zip(numbers, tokens, map(len, texts), words, strict=True)
        ]

    n_seen = 0
    for batch, encoded in _map_ahead(encode, _batches(found)):
        for i in range(-n_seen % CHECK_EVERY, len(batch), CHECK_EVERY):
            round_trip.checked += 1
            decoded = tokenizer.decode(encoded[i].tokens.tolist())
            round_trip.lossy += decoded != batch[i].text.encode()
        n_seen += len(batch)
        yield from encoded


def _batches(found: Iterable[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    size = 0
    for segment in found:
        batch.append(segment)
        size += len(segment.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _map_ahead(
    encode: Callable[[list[Segment]], list[Encoded]], batches: Iterable[list[Segment]]
) -> Iterator[tuple[list[Segment], list[Encoded]]]:
    """Apply a function to batches in threads, a few batches ahead; tokenizers release the GIL."""
    waiting: deque[tuple[list[Segment], Future[list[Encoded]]]] = deque()
    pool = ThreadPoolExecutor(N_BATCHES)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) > N_BATCHES:
                batch, future = waiting.popleft()
                yield batch, future.result()
        while waiting:
            batch, future = waiting.popleft()
            yield batch, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class ShardWriter:
    """Writes encoded segments to shards.

    folder: may contain shards of an interrupted preparation of the same data. `n_done` items and
    `bytes_done` of text are in them; skip these items, then `write` the following ones.
    """

    def __init__(self, folder: Path, dtype: type[np.unsignedinteger]) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shards = _complete_shards(folder)
        self.n_done = sum(int(shard["n_items"]) for shard in self._shards)
        self.bytes_done = sum(int(shard["n_bytes"].sum()) for shard in self._shards)

    def write(self, items: Iterable[Encoded], advance: Callable[[int], None]) -> Shards:
        """Write all items and return the complete shards."""
        items = iter(items)
        while (rows := self._write_shard(items, advance)) is not None:
            self._shards.append(rows)
        return Shards(self._folder, self._shards, self._dtype)

    def _write_shard(
        self, items: Iterator[Encoded], advance: Callable[[int], None]
    ) -> dict[str, np.ndarray] | None:
        """Write one shard and return its rows; None if there are no items left."""
        path = self._folder / f"{len(self._shards):05d}"
        rows: list[list[int]] = []  # fragment, tokens, bytes, words
        n_items = size = 0
        with atomic_write(path.with_suffix(".bin")) as partial, open(partial, "wb") as file:
            for item in items:
                file.write(item.tokens.astype(self._dtype).tobytes())
                counts = (len(item.tokens), item.n_bytes, item.n_words)
                if rows and rows[-1][0] == item.fragment:
                    rows[-1][1:] = [a + b for a, b in zip(rows[-1][1:], counts, strict=True)]
                else:
                    rows.append([item.fragment, *counts])
                n_items += 1
                size += item.n_bytes
                advance(item.n_bytes)
                if size >= SHARD_BYTES:
                    break
        if not n_items:
            return None
        names = ("fragments", "n_tokens", "n_bytes", "n_words")
        columns = dict(zip(names, np.array(rows, dtype=np.int64).T, strict=True))
        columns["n_items"] = np.array(n_items)
        with atomic_write(path.with_suffix(".npz")) as partial, open(partial, "wb") as file:
            np.savez(file, **columns)
        return columns


def _complete_shards(folder: Path) -> list[dict[str, np.ndarray]]:
    """Return the rows of the shards that an interrupted preparation has completed."""
    found: list[dict[str, np.ndarray]] = []
    while (path := folder / f"{len(found):05d}.npz").is_file():
        with np.load(path) as arrays:
            found.append(dict(arrays))
    return found


class Shards:
    """Tokens of all fragments, in the order in which they were read."""

    def __init__(
        self, folder: Path, shards: list[dict[str, np.ndarray]], dtype: type[np.unsignedinteger]
    ) -> None:
        def column(name: str) -> np.ndarray:
            return np.concatenate([shard[name] for shard in shards])

        self._fragments = column("fragments")
        self._n_tokens, self._n_bytes, self._n_words = map(
            column, ("n_tokens", "n_bytes", "n_words")
        )
        self._shard = np.repeat(np.arange(len(shards)), [len(x["fragments"]) for x in shards])
        starts = [np.cumsum(x["n_tokens"]) - x["n_tokens"] for x in shards]
        self._starts = np.concatenate(starts)
        self._folder = folder
        self._dtype = dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of text in all shards."""
        return int(self._n_bytes.sum())

    def read(self, fragment: int) -> Iterator[Encoded]:
        """Yield the tokens of a fragment, in one item per shard that contains some of them."""
        first, last = np.searchsorted(self._fragments, (fragment, fragment + 1))
        for row in range(first, last):
            # Not memory-mapped: the pages would count as memory of this process.
            path = self._folder / f"{self._shard[row]:05d}.bin"
            offset = int(self._starts[row]) * np.dtype(self._dtype).itemsize
            tokens = np.fromfile(path, self._dtype, int(self._n_tokens[row]), offset=offset)
            yield Encoded(fragment, tokens, int(self._n_bytes[row]), int(self._n_words[row]))
