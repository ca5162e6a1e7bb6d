"""Temporary folders of preparations: locked while they are filled, deleted if that was killed.

A lock belongs to an open file descriptor, so it ends with its process however that ends. On file
systems without locks nothing is deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from transformer_vq.files import PARTIAL, atomic_folder

# Of prepared corpora only: the cache may be a folder in which others have files, too.
_LEFTOVER = re.compile(rf"\.\w+-[0-9a-f]{{16}}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


@contextmanager
def locked_atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it is renamed to `folder`.

    Deletes the temporary folders that killed processes left next to it. Raises OSError if `folder`
    exists in the end and is not empty.
    """
    with ExitStack() as stack:
        # The parent is locked meanwhile: nobody may find the new folder before it is locked itself.
        with locked(folder.parent):
            _delete_leftovers(folder.parent)
            lock = stack.enter_context(ExitStack())  # released after the folder has been renamed
            partial = stack.enter_context(atomic_folder(folder))
            lock.enter_context(locked(partial))
        yield partial


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder and hold it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def move_aside(folder: Path) -> None:
    """Rename a folder (or whatever it is) so that the next preparation deletes it."""
    folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{PARTIAL}"))


def _delete_leftovers(cache: Path) -> None:
    for path in cache.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):  # of another user, or already deleted
                _delete_unless_locked(path)


def _delete_unless_locked(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
