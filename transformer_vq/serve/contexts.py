"""Stored contexts: documents that were read once, kept as files, and continued by many requests.

Ids are random and known to the store, so nothing that a client sends becomes a path. Files are
written atomically: a server that is killed loses no context whose id it has returned. Only one
process may use a folder; `tvq serve` locks it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from transformer_vq.errors import UserError
from transformer_vq.files import (
    CorruptFileError,
    make_private_folder,
    partial_path,
    read_verified_json,
    remove_partial_files,
    write_verified_json,
)
from transformer_vq.generation.prefill import Context
from transformer_vq.generation.snapshot import SnapshotError, Snapshots
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Start

IN_MEMORY = 8  # contexts that stay loaded


@dataclass(frozen=True)
class StoredContext:
    """What is known about a stored context."""

    id: str
    name: str
    tokens: int
    bytes: int
    created: int
    parent: str | None = None
    """The context that it is a branch of."""

    def plain(self) -> dict[str, Any]:
        """Return the JSON object that clients receive."""
        return {"object": "context", **asdict(self)}


class ContextStore:
    """Contexts of one model in a folder, at most `max_bytes` in all."""

    def __init__(self, folder: Path, snapshots: Snapshots, max_bytes: int) -> None:
        self._folder, self._snapshots, self._max_bytes = folder, snapshots, max_bytes
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, Context] = OrderedDict()
        self._entries: dict[str, StoredContext] = {}
        make_private_folder(folder)
        remove_partial_files(folder)
        for path in folder.glob("*.json"):
            entry = _read_entry(path)
            if entry is not None and self._path(entry.id).is_file():
                self._entries[entry.id] = entry
        for path in folder.glob("ctx-*.safetensors"):
            if not path.with_suffix(".json").exists():  # killed before its id was returned
                path.unlink()

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
        with self._lock:
            loaded = self._loaded.get(context)
            if loaded is None:
                try:
                    loaded = self._snapshots.load(self._path(entry.id), n_rows=1)
                except SnapshotError as error:
                    raise self._unreadable(entry) from error
            self._remember(context, loaded)
        return Start(loaded, entry.id.encode(), entry.tokens)

    def _unreadable(self, entry: StoredContext) -> APIError:
        """Return the error for a file that cannot be read; if it is gone, so is its entry."""
        if self._path(entry.id).exists():
            message = f"the context {entry.id} cannot be read; upload the document again"
            return APIError(409, message, "context")
        self._entries.pop(entry.id, None)
        self._entry_path(entry.id).unlink(missing_ok=True)
        message = f"the file of the context {entry.id} is gone; upload the document again"
        return APIError(404, message, "context", "context_not_found")

    def add(
        self, context: Context, n_tokens: int, name: str = "", parent: str | None = None
    ) -> StoredContext:
        """Store a context and return its entry; the file exists when this returns."""
        identity = f"ctx-{secrets.token_hex(12)}"
        path = self._path(identity)
        with _removed_on_failure(path):
            self._snapshots.save(path, context)
            size = path.stat().st_size
            entry = StoredContext(identity, name, n_tokens, size, int(time.time()), parent)
            with self._lock:
                used = sum(x.bytes for x in self._entries.values())
                if used + size > self._max_bytes:
                    message = (
                        f"contexts use {used:,} of {self._max_bytes:,} bytes; delete some with "
                        "DELETE /v1/contexts/ID"
                    )
                    raise APIError(413, message, code="storage_full")
                write_verified_json(self._entry_path(identity), asdict(entry))
                self._entries[identity] = entry
                self._remember(identity, context)
        return entry

    def _remember(self, identity: str, context: Context) -> None:
        """Keep a context in memory, and forget the least recently used one above the limit."""
        self._loaded[identity] = context
        self._loaded.move_to_end(identity)
        while len(self._loaded) > IN_MEMORY:
            self._loaded.popitem(last=False)

    def upload(self, content: bytes, name: str) -> StoredContext:
        """Store a downloaded context again, after checking that it belongs to this model."""
        path = partial_path(self._folder / "upload")
        try:
            with _removed_on_failure(path):
                path.write_bytes(content)
            context = self._snapshots.load(path, n_rows=1)
        except SnapshotError as error:
            reason = str(error).replace(f"{path} ", "").replace(str(path), "the file")
            reason = reason.split(";")[0]
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
        entry = self.get(context)
        with self._lock:
            self._entries.pop(entry.id, None)
            self._loaded.pop(entry.id, None)
        self._entry_path(entry.id).unlink(missing_ok=True)
        self._path(entry.id).unlink(missing_ok=True)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}.safetensors"

    def _entry_path(self, identity: str) -> Path:
        return self._folder / f"{identity}.json"


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Delete a file again if the block raises; an error of the disk becomes an APIError."""
    try:
        yield
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = (error.strerror or "disk error").lower()
            message = f"the server cannot store the context: {reason}"
            raise APIError(507, message, code="storage_full") from error
        raise


def _read_entry(path: Path) -> StoredContext | None:
    try:
        values = read_verified_json(path)
        return StoredContext(**{f.name: values[f.name] for f in fields(StoredContext)})
    except (CorruptFileError, UserError, KeyError, TypeError):
        return None
