"""Find the files that a user passes as text data, and recognize their formats.

A path is a file, a folder or a pattern. Formats are recognized by name and content; a file in a
structured format, such as Parquet, is never taken for plain text.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformer_vq.config.data import Format
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import (
    COMPRESSED_SUFFIXES,
    Files,
    compression_of,
    members,
)
from transformer_vq.data.sources.paths import (
    READ_ERRORS,
    error_reason,
    expand_user,
    list_files,
    path_kind,
)
from transformer_vq.data.sources.recognition import FORMAT_NAMES, NotTextError, recognize
from transformer_vq.data.sources.saved_datasets import only_shards, saved_splits
from transformer_vq.errors import UserError
from transformer_vq.progress import Advance, progress_bar

__all__ = ["Input", "find_inputs", "saved_splits", "unreadable"]

_MANY = 10_000  # files that take seconds
_DOCUMENT_MEMBERS = ("[Content_Types].xml", "mimetype", "META-INF/MANIFEST.MF")


@dataclass(frozen=True)
class Input:
    """One file, or one member of a zip archive, with its format."""

    path: Path
    format: Format
    """Never "auto"."""
    member: str | None = None

    @property
    def name(self) -> str:
        """The name for messages, such as "a.zip/inner.txt"."""
        return _name(self.path, self.member)


def find_inputs(
    paths: Sequence[str], format: Format = "auto", option: str = "--data.path"
) -> list[Input]:
    """Return the files of all paths, each one once, in the order of the paths and sorted by name.

    A path is a file, a folder, whose hidden files are skipped, or a pattern such as
    'data/**/*.jsonl'. The files of one folder, pattern or archive must have the same format.
    format: the format of all files; auto recognizes it. option: the option that gave the paths.
    """
    found: list[Input] = []
    seen: set[str] = set()
    with Files() as files:
        for path in paths:
            listed = _list(path, format, option)
            if not listed:
                raise DataError(f"{option} {path}: contains no files; give another path")
            new: dict[str, Path] = {}
            for file in listed:
                new.setdefault(os.path.realpath(file), file)
            unseen = [file for real, file in new.items() if real not in seen]
            seen.update(new)
            if unseen:
                found += _recognize_all(files, path, unseen, format, option)
    return found


def unreadable(failed: Sequence[tuple[str, Exception]], total: int) -> DataError:
    """Return the error for files that cannot be read. failed: their names and errors."""
    name, error = failed[0]
    reason = error_reason(error)
    if total == 1:
        return DataError(
            f"cannot read {name}: {reason}; it may be incomplete, copy or download it again"
        )
    return DataError(
        f"cannot read {len(failed):,} of {total:,} files, for example {name} ({reason}); "
        "fix or remove them"
    )


def _list(text: str, format: Format, option: str) -> list[Path]:
    """Return the files of one path in order."""
    path = expand_user(text, option)
    if not os.path.lexists(path) and glob.has_magic(str(path)):
        found = _matches(path)
        if not found:
            raise DataError(f"{option} {text}: no file matches this pattern; check the pattern")
    elif path_kind(path, f"give a file, a folder or a pattern as {option}") == "file":
        return [path]
    else:
        found = list_files(path, broken_links=True)
    found = sorted(set(found), key=os.fsencode)
    return only_shards(found) if format in ("auto", "arrow") else found


def _matches(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, and those in matching folders."""
    found: list[Path] = []
    folders: set[Path] = set()
    for path in map(Path, sorted(glob.glob(str(pattern), recursive=True))):
        if not path.is_dir():
            if path.exists():
                path_kind(path, "use a pattern that matches regular files only")
            found.append(path)
        elif folders.isdisjoint(path.parents):
            folders.add(path)
            found += list_files(path, broken_links=True)
    return found


def _recognize_all(
    files: Files, path: str, listed: Sequence[Path], format: Format, option: str
) -> list[Input]:
    """Recognize the files of one path. Raises DataError if they differ or are not text."""
    found: list[Input] = []
    failed: list[tuple[str, Exception]] = []
    not_text: list[tuple[str, Exception]] = []
    with _progress(len(listed)) as advance:
        for file in listed:
            member = None
            try:
                for member in _members(files, file):
                    open_member = partial(files.open, file, member)
                    known = recognize(_name(file, member), open_member, format)
                    found.append(Input(file, known, member))
            except NotTextError as error:
                not_text.append((_name(file, member), error))
            except UserError:
                raise
            except READ_ERRORS as error:
                failed.append((_name(file, member), error))
            advance(1)
    if failed:
        raise unreadable(failed, len(listed))
    if not_text:
        raise _not_text(not_text, len(listed), path)
    if not found:
        raise DataError(f"{option} {path}: contains no files; give another path")
    _check_uniform(found, path)
    return found


@contextmanager
def _progress(n_files: int) -> Iterator[Advance]:
    """Show the progress of checking many files."""
    if n_files < _MANY:
        yield lambda n: None
        return
    with progress_bar("checking", n_files, "files") as advance:
        yield advance


def _members(files: Files, path: Path) -> Iterator[str | None]:
    """Yield the members of a zip archive, and None for any other file."""
    with open(path, "rb") as file:
        head = file.read(1 << 12)
    compression = compression_of(head)
    if compression is None and path.suffix.lower() in COMPRESSED_SUFFIXES:
        _check_decompressed(path, head)
    if compression != ".zip":
        yield None
        return
    found = members(files.archive(path))
    if any(info.filename in _DOCUMENT_MEMBERS for info in found):
        raise DataError(f"{path} is a document or a program, not text; convert it to text")
    for info in found:
        if info.flag_bits & 1:
            raise DataError(
                f"{_name(path, info.filename)} is encrypted; extract the archive and give the files"
            )
        yield info.filename


def _check_decompressed(path: Path, head: bytes) -> None:
    """Raise OSError unless a file that is named like a compressed one is text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # may end within a character
        is_text = b"\0" not in head
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise OSError(f"it is not a valid {path.suffix} file")


def _not_text(failed: Sequence[tuple[str, Exception]], total: int, path: str) -> DataError:
    name, error = failed[0]
    if total == 1:
        return DataError(
            f"{name} is not text ({error}); convert it to text, or use --data.format text to train "
            "on its bytes as they are"
        )
    return DataError(
        f"{path}: {len(failed):,} of {total:,} files are not text, for example {name} ({error}); "
        "remove them, or use a pattern such as 'folder/**/*.txt'"
    )


def _check_uniform(inputs: Sequence[Input], path: str) -> None:
    """Raise DataError if one folder, pattern or archive contains several formats."""
    by_format: dict[str, list[Input]] = {}
    for input in inputs:
        by_format.setdefault(input.format, []).append(input)
    if len(by_format) < 2:
        return
    kinds = " and ".join(
        f"{len(some):,} {FORMAT_NAMES[format]} {'file' if len(some) == 1 else 'files'} "
        f"(for example {some[0].name})"
        for format, some in by_format.items()
    )
    example = next(some[0] for format, some in by_format.items() if format != "text")
    fix = f"use a pattern such as '{example.path.parent}/*{''.join(example.path.suffixes[-2:])}'"
    if example.member is not None or not example.path.suffix:
        fix = "give only files of one format"
    if "text" in by_format:
        fix = f"use --data.format text to read every file as text, or {fix}"
    raise DataError(f"{path} contains different formats: {kinds}; {fix}")


def _name(path: Path, member: str | None) -> str:
    return str(path) if member is None else f"{path}/{member}"
