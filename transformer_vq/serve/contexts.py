"""The store of contexts: documents that were prefilled once.

Ids are random and known to the store, so nothing that a client sends becomes a path. Files are
written atomically: a server that is killed loses no context whose id it has returned. Only one
process may use a folder; `tvq serve` locks it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from transformer_vq.files import make_private_folder, partial_path, remove_partial_files
from transformer_vq.generation.prefill import Context
from transformer_vq.generation.snapshot import SnapshotError, Snapshots
from transformer_vq.serve.requests import Start
from transformer_vq.serve.schema import APIError

IN_MEMORY = 8  # contexts that stay loaded


@dataclass(frozen=True)
class StoredContext:
    """What is known about a stored context."""

    id: str
    name: str
    tokens: int
    bytes: int
    created: int
    parent: str | None = None  # the context that it is a branch of

    def plain(self) -> dict[str, Any]:
        """Return the JSON object that clients receive."""
        return {"object": "context", **asdict(self)}


class ContextStore:
    """Contexts of one model in a folder, at most `max_bytes` in all; each is one file."""

    def __init__(self, folder: Path, snapshots: Snapshots, max_bytes: int) -> None:
        self._folder, self._snapshots, self._max_bytes = folder, snapshots, max_bytes
        self._lock = threading.Lock()
        self._load = lru_cache(IN_MEMORY)(partial(snapshots.load, n_rows=1))
        make_private_folder(folder)
        remove_partial_files(folder)
        found = map(_read_entry, folder.glob("ctx-*.safetensors"))
        self._entries = {entry.id: entry for entry in found if entry is not None}

    def list(self) -> list[StoredContext]:
        """Return all contexts, the newest first."""
        return sorted(self._entries.values(), key=lambda entry: (-entry.created, entry.id))

    def get(self, context: str) -> StoredContext:
        """Return a context; raise APIError if it does not exist."""
        entry = self._entries.get(context)
        if entry is None:
            message = f"the context {context!r:.80} does not exist; GET /v1/contexts lists them"
            raise APIError(404, message, "context", "context_not_found")
        return entry

    def open(self, context: str) -> Start:
        """Return a context to continue from."""
        entry = self.get(context)
        try:
            loaded = self._load(self._path(entry.id))
        except SnapshotError as error:
            raise self._unreadable(entry) from error
        return Start(loaded, entry.id.encode(), entry.tokens)

    def _unreadable(self, entry: StoredContext) -> APIError:
        """Forget a context whose file is gone or damaged; return the error."""
        self._entries.pop(entry.id, None)
        message = f"the context {entry.id} cannot be read; upload the document again"
        return APIError(404, message, "context", "context_not_found")

    def add(
        self, context: Context, n_tokens: int, name: str = "", parent: str | None = None
    ) -> StoredContext:
        """Store a context and return its entry; the file exists when this returns."""
        path = self._path(f"ctx-{secrets.token_hex(12)}")
        metadata = {"name": name, "tokens": str(n_tokens), "parent": parent or ""}
        with _removed_on_failure(path):
            self._snapshots.save(path, context, metadata)
            entry = _read_entry(path)
            assert entry is not None
            with self._lock:
                used = sum(x.bytes for x in self._entries.values())
                if used + entry.bytes > self._max_bytes:
                    problem = f"contexts use {used:,} of {self._max_bytes:,} bytes"
                    message = f"{problem}; delete some with DELETE /v1/contexts/ID"
                    raise APIError(413, message, code="storage_full")
                self._entries[entry.id] = entry
        return entry

    def upload(self, content: bytes, name: str) -> StoredContext:
        """Store a downloaded context again, after checking that it belongs to this model."""
        path = partial_path(self._folder / "upload")
        try:
            with _removed_on_failure(path):
                path.write_bytes(content)
            context = self._snapshots.load(path, n_rows=1)
        except SnapshotError as error:
            reason = str(error).replace(f"{path} ", "").replace(str(path), "the file").split(";")[0]
            raise APIError(400, f"the upload is not a context of this model: {reason}") from error
        finally:
            path.unlink(missing_ok=True)
        return self.add(context, int(context.state.position[0]), name)

    def content(self, context: str) -> BinaryIO:
        """Return the open file of a context, which may be deleted meanwhile."""
        entry = self.get(context)
        try:
            return self._path(entry.id).open("rb")
        except OSError as error:
            raise self._unreadable(entry) from error

    def delete(self, context: str) -> None:
        """Delete a context; requests that continue from it are not affected."""
        path = self._path(self.get(context).id)
        with self._lock:
            self._entries.pop(context, None)
        path.unlink(missing_ok=True)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}.safetensors"


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Delete a file again if the block raises; an error of the disk becomes an APIError."""
    try:
        yield
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            message = f"the server cannot store the context: {error.strerror or 'disk error'}"
            raise APIError(507, message.lower(), code="storage_full") from error
        raise


def _read_entry(path: Path) -> StoredContext | None:
    """Return what the metadata of a file say; None if it is not a stored context."""
    try:
        with safe_open(path, "pt") as file:
            values = file.metadata() or {}
        status, name, parent = path.stat(), values["name"], values["parent"] or None
        n_tokens, created = int(values["tokens"]), int(status.st_mtime)
        return StoredContext(path.stem, name, n_tokens, status.st_size, created, parent)
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
