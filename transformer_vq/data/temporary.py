"""Locked temporary folders for corpora that are being prepared.

A corpus is written to a new temporary folder, which is renamed when it is complete. Intermediate
results are in a work folder, which is kept if the preparation is interrupted.

Each folder is locked while it is filled. An unlocked temporary folder therefore belongs to a killed
process, and the next preparation deletes it. A lock belongs to an open file descriptor, so it is
released however its process ends. Work folders are deleted when they have not been used for a week.
On file systems without locks nothing is deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from transformer_vq.errors import UserError
from transformer_vq.files import PARTIAL, atomic_folder, partial_path, remove_partial_files
from transformer_vq.progress import info

# Matches corpora only, because the cache folder may contain other files of the user.
_LEFTOVER = re.compile(rf"\.\w+-[0-9a-f]{{16}}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")
_WORK = re.compile(r"\.\w+-[0-9a-f]{16}\.work")
MAX_AGE = 7 * 24 * 3600  # seconds after which an unused work folder is deleted


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
def work_folder(folder: Path) -> Iterator[Path]:
    """Yield a locked folder for intermediate results of preparing `folder`.

    It is deleted when `folder` exists or the data are invalid. Otherwise it is kept, so that the
    next preparation can resume. Waits while another process prepares the same folder.
    """
    work = folder.with_name(f".{folder.name}.work")
    while True:
        work.mkdir(exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock_or_wait(descriptor)
            if not _is_at(descriptor, work):
                continue  # the process that held the lock has deleted the folder
            remove_partial_files(work)
            yield work
            return
        except UserError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            if os.path.lexists(folder):
                shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):
                work.rmdir()  # only if it is empty
            os.close(descriptor)


def _lock_or_wait(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            info("another process is preparing the same data; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the folder that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
        if _LEFTOVER.fullmatch(path.name) or (_WORK.fullmatch(path.name) and _is_old(path)):
            with suppress(OSError):  # owned by another user, or already deleted
                _delete_unless_locked(path)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > MAX_AGE
    except OSError:
        return False


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
