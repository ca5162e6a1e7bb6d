"""Prefix reuse: contexts of prompts that were read before, found by the tokens they contain.

Contexts are stored at multiples of the prefill segment and at the end of a prompt. A prompt that
continues from one of them is cut at the same places as without it, so the result is the same to the
last bit. The least recently used ones move from memory to disk, and are then deleted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from transformer_vq.files import make_private_folder, remove_partial_files
from transformer_vq.generation.prefill import SEGMENT_LEN, Context
from transformer_vq.generation.snapshot import SnapshotError, Snapshots

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"


def prefix_digests(tokens: Sequence[int], start: bytes = b"") -> dict[int, bytes]:
    """Return a digest of the tokens up to every multiple of the segment length, and up to the end.

    start: digest of a context that the tokens continue.
    """
    array = np.asarray(tokens, dtype=np.int64)
    running = hashlib.sha256(start)
    found = {}
    for begin in range(0, len(array), SEGMENT_LEN):
        part = array[begin : begin + SEGMENT_LEN]
        running.update(part.tobytes())
        found[begin + len(part)] = running.digest()
    return found


def is_stored(n: int, n_prompt: int) -> bool:
    """Return whether the context after n tokens of a prompt is worth storing.

    These are its end, the last multiple of the segment length, and such multiples at doubling
    distances, which prompts with the same beginning share.
    """
    if n == n_prompt:
        return True
    n_segments, rest = divmod(n, SEGMENT_LEN)
    is_last = n + SEGMENT_LEN > n_prompt
    return not rest and (is_last or n_segments & (n_segments - 1) == 0)


class PrefixStore:
    """Contexts by digest, within a limit of bytes in memory and of bytes on disk.

    folder: None keeps contexts in memory only; only one process may use a folder. Files of another
    model are ignored, and deleted as the least recently used ones.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        memory_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
    ) -> None:
        self._snapshots = snapshots
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._folder = folder if disk_bytes > 0 else None
        self._contexts: OrderedDict[bytes, Context] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "prefixes")
        if self._folder is not None:
            make_private_folder(self._folder)
            remove_partial_files(self._folder)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self._n_bytes

    def get(self, digest: bytes) -> Context | None:
        """Return a stored context and mark it as used."""
        with self._lock:
            context = self._contexts.get(digest)
            if context is not None:
                self._contexts.move_to_end(digest)
                return context
        context = self._read(digest)
        if context is not None:
            self.put(digest, context)
        return context

    def put(self, digest: bytes, context: Context) -> None:
        """Store a context; it must not be modified afterwards."""
        size = _size(context)
        with self._lock:
            if digest in self._contexts:
                self._contexts.move_to_end(digest)
                return
            if size > self._memory_bytes:
                self._spill(digest, context)
                return
            self._contexts[digest] = context
            self._n_bytes += size
            while self._n_bytes > self._memory_bytes:
                oldest, evicted = self._contexts.popitem(last=False)
                self._n_bytes -= _size(evicted)
                self._spill(oldest, evicted)

    def close(self) -> None:
        """Write all contexts to disk, if there is a folder."""
        with self._lock:
            for digest, context in self._contexts.items():
                self._spill(digest, context)
            self._contexts.clear()
            self._n_bytes = 0
        self._writer.shutdown()

    def _spill(self, digest: bytes, context: Context) -> None:
        if self._folder is not None:
            self._writer.submit(self._write, self._folder, digest, context)

    def _write(self, folder: Path, digest: bytes, context: Context) -> None:
        """Write a context and delete the least recently used ones above the limit."""
        path = folder / f"{digest.hex()}{SUFFIX}"
        try:
            if path.exists():
                path.touch()
            else:
                self._snapshots.save(path, context)
            n_bytes = 0
            for size, old in _newest_first(folder):
                n_bytes += size
                if n_bytes > self._disk_bytes:
                    old.unlink(missing_ok=True)
        except OSError as error:  # such as a full disk: the prefix is read again when needed
            logger.warning("cannot store a prefix: %s", error)

    def _read(self, digest: bytes) -> Context | None:
        if self._folder is None:
            return None
        path = self._folder / f"{digest.hex()}{SUFFIX}"
        if not path.exists():
            return None
        try:
            context = self._snapshots.load(path, n_rows=1)
            path.touch()
        except (SnapshotError, OSError):  # of another model, corrupt, or just deleted
            return None
        return context


def _size(context: Context) -> int:
    return context.state.n_bytes + context.logits.numel() * context.logits.element_size()


def _newest_first(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield sizes and paths of the files, the most recently used first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((status.st_mtime_ns, status.st_size, path))
    for _, size, path in sorted(found, reverse=True):
        yield size, path
