"""What a corpus is made from: anything that yields the tokens of its splits piece by piece."""

from __future__ import annotations

import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from transformer_vq.errors import UserError
from transformer_vq.progress import warn

SPLITS = ("train", "validation", "test")

READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, ArithmeticError, MemoryError),
    *(struct.error, lzma.LZMAError, zipfile.BadZipFile, zlib.error),
)
"""What Python's own readers raise for corrupt or unsupported files. Catch DataError before them."""


class DataError(UserError):
    """Data that are missing, unreadable or unsuitable; the message names the fix."""


@dataclass(frozen=True)
class Chunk:
    """A stretch of tokens, with the bytes and words of the original that it stands for."""

    tokens: np.ndarray
    begins: bool
    """A document begins with this piece."""
    n_bytes: int
    n_words: int = 0


class Source(Protocol):
    """Material that can be divided into train, validation and test and turned into tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int:
        """The token that stands before the first of a document."""
        ...

    @property
    def has_words(self) -> bool: ...

    @property
    def n_bytes(self) -> int:
        """All splits together, for the progress bar."""
        ...

    def fingerprint(self) -> list[object]:
        """Plain values that change whenever the tokens might."""
        ...

    def setup(self, folder: Path) -> None:
        """What must be done before the first piece; files put into `folder` stay in the corpus."""
        ...

    def chunks(self, split: str) -> Iterator[Chunk]:
        """The tokens of one split, in order; nothing is ever read whole."""
        ...


def stat_of(path: Path, root: Path) -> list[object]:
    """Name, size and time of a file: what says that it has not changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error
    return [str(path.relative_to(root)), status.st_size, status.st_mtime_ns]


def reason(error: Exception) -> str:
    """Return why something failed, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def kind_of(path: Path, fix: str) -> Literal["file", "folder"]:
    """Return what a path is. Raises DataError, ending with `fix`, for anything else.

    Devices and pipes are rejected before they are opened: reading them may never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        what = "is a broken symbolic link" if path.is_symlink() else "does not exist"
        raise DataError(f"{path} {what}; {fix}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}; {fix}") from error
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    raise DataError(f"{path} is neither a regular file nor a folder; {fix}")


def check_folder(path: Path, fix: str) -> None:
    """Raise DataError, ending with `fix`, unless a path is a folder."""
    if kind_of(path, fix) != "folder":
        raise DataError(f"{path} is not a folder; {fix}")


def files_in(
    folder: Path, recursive: bool = True, wanted: Callable[[str], bool] = lambda name: True
) -> list[Path]:
    """Return the regular files in a folder whose name is `wanted`, except hidden ones.

    Warns about pipes, devices and broken symbolic links. Raises DataError if a folder cannot be
    listed, because its files would be missing without notice.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"cannot list the folder {error.filename}: {reason(error)}") from error

    found: list[Path] = []
    skipped: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and wanted(name):
                path = Path(parent, name)
                (found if os.path.isfile(path) else skipped).append(path)
    if skipped:
        what = f"{len(skipped):,} entries of {folder} are not regular files and are skipped"
        warn(f"{what}, for example {min(skipped)}")
    return found
