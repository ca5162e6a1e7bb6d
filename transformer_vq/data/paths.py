"""Files and folders that a user passes as data: checks, listings, and their error."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from transformer_vq.errors import UserError
from transformer_vq.progress import warn

SPLITS = ("train", "validation", "test")


class DataError(UserError):
    """Data that is missing, unreadable or unsuitable; the message names the fix."""


def error_reason(error: BaseException) -> str:
    """Return why something failed, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def path_kind(path: Path, fix: str) -> Literal["file", "folder"]:
    """Return what a path is. Raises DataError, ending with `fix`, for anything else.

    Devices and pipes are rejected without opening them, because reading them may never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        problem = "is a broken symbolic link" if path.is_symlink() else "does not exist"
        raise DataError(f"{path} {problem}; {fix}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error_reason(error)}; {fix}") from error
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    raise DataError(f"{path} is neither a regular file nor a folder; {fix}")


def check_folder(path: Path, fix: str) -> None:
    """Raise DataError, ending with `fix`, unless a path is a folder."""
    if path_kind(path, fix) != "folder":
        raise DataError(f"{path} is not a folder; {fix}")


def list_files(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """Return the regular files in a folder whose names are `wanted`, except hidden ones, sorted.

    Warns about entries that are skipped. Raises DataError if a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"cannot list the folder {error.filename}: {error_reason(error)}")

    found: list[Path] = []
    skipped: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        skipped += [path for name in folders if (path := Path(parent, name)).is_symlink()]
        for path in [Path(parent, name) for name in names if not name.startswith(".")]:
            if wanted(path.name):
                (found if path.is_file() else skipped).append(path)
    if skipped:
        what = f"{len(skipped):,} entries of {folder}, such as {min(skipped)}"
        warn(f"{what}, are skipped, because they are links to folders or not regular files")
    return sorted(found, key=os.fsencode)
