"""Locked temporary folders for corpora that are being prepared.

Each folder is locked while it is filled. An unlocked temporary folder therefore belongs to a killed
process, and the next preparation deletes it. A lock belongs to an open file descriptor, so it is
released however its process ends. On file systems without locks nothing is deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from transformer_vq.files import PARTIAL, atomic_folder, partial_path

# Matches corpora only, because the cache folder may contain other files of the user.
_LEFTOVER = re.compile(rf"\.\w+-[0-9a-f]{{16}}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


@contextmanager
def locked_atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a locked temporary folder to fill; on success it is renamed to `folder`.

    Deletes the temporary folders that killed processes left next to it. Raises OSError if `folder`
    exists and is not empty when the block ends.
    """
    with ExitStack() as stack:
        # The parent is locked so that no process finds the new folder before it is locked.
        with locked(folder.parent):
            _delete_leftovers(folder.parent)
            lock = stack.enter_context(ExitStack())  # released after the folder has been renamed
            partial = stack.enter_context(atomic_folder(folder))
            lock.enter_context(locked(partial))
        yield partial


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; wait for it if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> None:
    """Rename a folder, file or link so that the next preparation deletes it."""
    path.rename(partial_path(path))


def _delete_leftovers(cache: Path) -> None:
    for path in cache.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):  # owned by another user, or already deleted
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
