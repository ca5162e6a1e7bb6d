"""Atomic writes and verified reads: a file is complete or absent, and corruption is detected.

Every file is written under a temporary name and then renamed. Both are flushed to the disk, so that
a power failure is survived too. Equal content gives equal files. Files that affect results have a
SHA-256 in the manifest of their folder; safetensors files, which may travel alone, also have one in
their metadata. Temporary names are random and created exclusively, so existing files and symbolic
links are never written through. `remove_partial_files` deletes what killed processes left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from transformer_vq.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor  # imported late, so that reading JSON files stays fast

DIGEST = "sha256"  # name of the checksum in safetensors metadata
PARTIAL = ".partial"  # suffix of temporary files and folders
MANIFEST = "manifest.json"  # {"files": {name: SHA-256}}
CHECKED = ".checked"  # as old as the last comparison with the manifest
DTYPES = {"bfloat16": "BF16", "bool": "BOOL", "uint8": "U8"}  # others are F32, I64 and so on
Tensors = Mapping[str, "Tensor"]
Fetch = Callable[[str], "Tensor"]
Header = dict[str, tuple[str, tuple[int, ...]]]
"""The tensors of a safetensors file: name -> dtype, such as F32, and shape."""


class CorruptFileError(UserError):
    """A file that is missing, incomplete, or different from what was written."""


class MissingFileError(CorruptFileError, FileNotFoundError):
    """A file that does not exist."""


def check_can_write(option: str, path: Path | None, overwrite: bool = False) -> None:
    """Raise UserError if an output file cannot be written, so that commands fail early.

    option: the command-line option that names the file, for the message. path: None is accepted.
    """
    if path is None:
        return
    is_link = path.is_symlink()  # a link is replaced, not followed
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: give a file name in an existing folder")
    if path.exists() and not path.is_file() and not is_link:
        raise UserError(f"{option} {path}: is a device or pipe; give a regular file")
    if not overwrite and (path.exists() or is_link):
        raise UserError(f"{option} {path}: the file exists; use --overwrite or another name")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {path}: the folder is not writable; use another one")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to; on success it is renamed to `path`.

    If the block raises, the temporary file is deleted and `path` is unchanged.
    """

    # Created here, not by the writer, so that the mode of every file follows the umask.
    with _renamed(path, lambda partial: partial.touch(exist_ok=False)) as partial:
        mode = partial.stat().st_mode & 0o777
        yield partial
        partial.chmod(mode)
        _sync(partial)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it is renamed to `folder`.

    If the block raises, the temporary folder is deleted. Raises OSError if `folder` exists and is
    not empty when the block ends.
    """
    with _renamed(folder, lambda partial: partial.mkdir(parents=True)) as partial:
        yield partial
        _sync_all(partial)


def publish_folder(partial: Path, folder: Path) -> None:
    """Rename a complete temporary folder to `folder`, as at the end of `atomic_folder`."""
    _sync_all(partial)
    os.replace(partial, folder)
    _sync(folder.parent)


@contextmanager
def _renamed(path: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a new temporary file or folder; on success it is renamed to `path`, else deleted."""
    partial = partial_path(path)
    try:
        create(partial)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        yield partial
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        remove(partial)


@contextmanager
def lock_folder(folder: Path, error: UserError) -> Iterator[None]:
    """Lock a folder until the block or the process ends; raise `error` if another one holds it."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
    with open(os.open(folder / ".lock", flags, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error from None
        yield


def make_private_folder(folder: Path) -> None:
    """Create a folder, or restrict an existing one, so that only this user can open it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _sync(path: Path) -> None:
    """Wait until the content of a file or the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not all file systems can do that for folders
            raise
    finally:
        os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for path in (*filter(Path.is_file, folder.rglob("*")), folder):
        _sync(path)


def remove_partial_files(folder: Path) -> None:
    """Delete the temporary files and folders that killed processes left in `folder`.

    Call it only while no other process writes to `folder`.
    """
    for path in folder.glob(f".*.{'[0-9a-f]' * 8}{PARTIAL}"):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Return a new random temporary name next to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; raise CorruptFileError if it is missing or invalid."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist") from None
    except OSError as error:
        raise CorruptFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; raise CorruptFileError if it is missing or invalid."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} is not a JSON object")
    return value


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file; raise CorruptFileError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, DIGEST).hexdigest()
    except OSError as error:
        raise CorruptFileError(f"cannot read {path}: {error.strerror or error}") from error


def write_manifest(
    folder: Path, names: Collection[str] | None = None, known: Mapping[str, str] | None = None
) -> None:
    """Write the manifest of a folder: the SHA-256 of its files. Call it last.

    names: the files, relative to the folder; by default all except hidden ones. known: the SHA-256
    of some files, which are not read.
    """
    known = known or {}
    if names is None:
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        visible = [p for p in paths if not any(part.startswith(".") for part in p.parts)]
        names = [path.as_posix() for path in visible if path.as_posix() != MANIFEST]
    digests = {name: known.get(name) or file_digest(folder / name) for name in sorted(names)}
    write_json(folder / MANIFEST, {"files": digests})


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file; raise CorruptFileError if there is no valid manifest."""
    digests = read_object(folder / MANIFEST).get("files")
    if not isinstance(digests, dict) or not all(isinstance(x, str) for x in digests.values()):
        raise CorruptFileError(f"{folder / MANIFEST} is not a manifest")
    return digests


def changed_files(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Return the files that are missing or differ from the manifest of their folder.

    names: the files to compare, by default all in the manifest. A file that is not in the manifest
    counts as changed. Raises CorruptFileError if there is no valid manifest.
    """
    digests = read_manifest(folder)
    return [
        name
        for name in (digests if names is None else names)
        if not (folder / name).is_file() or file_digest(folder / name) != digests.get(name)
    ]


def check_manifest(
    folder: Path,
    fix: str = "",
    names: Collection[str] | None = None,
    editable: Collection[str] = (),
) -> list[str]:
    """Raise CorruptFileError if a file of a folder is missing or changed.

    Returns the changed files among `editable`, which are not an error, so that the caller can warn.
    fix: the end of the message. names: as in `changed_files`.
    """
    end = f"; {fix}" if fix else ""
    try:
        changed = changed_files(folder, names)
    except CorruptFileError as error:
        raise CorruptFileError(f"{error}{end}") from error
    for name in changed:
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder / name} does not exist{end}")
        if name not in editable:
            raise CorruptFileError(f"{folder / name} is corrupt: its checksum does not match{end}")
    return changed


def check_large_files(folder: Path, fix: str) -> None:
    """Check a manifest, unless no file has changed since the last time that this succeeded."""
    with suppress(OSError, CorruptFileError):
        checked = (folder / CHECKED).stat().st_mtime_ns
        names = (MANIFEST, *read_manifest(folder))
        if all((folder / name).stat().st_ctime_ns < checked for name in names):
            return
    partial = partial_path(folder / CHECKED)
    with suppress(OSError):  # in a read-only folder, files are hashed each time
        partial.touch()  # before reading, so that later changes are visible
    try:
        check_manifest(folder, fix)
        with suppress(OSError):
            os.replace(partial, folder / CHECKED)
    finally:
        with suppress(OSError):
            remove(partial)


def write_tensors(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, fetch: Fetch | None = None
) -> None:
    """Write a safetensors file with a checksum in its metadata, because it may travel alone.

    fetch: returns the tensor of a name; then `tensors` may be on the meta device, and one of them
    is in memory at a time. Raises OSError if the file cannot be written, for example because the
    disk is full.
    """
    metadata = metadata or {}
    digest = _tensors_digest(tensors, metadata, fetch)
    with atomic_write(path) as partial:
        write_safetensors(partial, tensors, metadata | {DIGEST: digest}, fetch)


def write_safetensors(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, fetch: Fetch | None = None
) -> None:
    """Write a safetensors file, one tensor at a time; equal content gives equal files."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    header: dict[str, Any] = {"__metadata__": dict(sorted((metadata or {}).items()))}
    end = 0
    for name in names:
        x = tensors[name]
        begin, end = end, end + x.numel() * x.element_size()
        dtype = str(x.dtype).removeprefix("torch.")
        kind = DTYPES.get(dtype) or dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_content(tensors[name] if fetch is None else fetch(name)))
        file.flush()
        os.fsync(file.fileno())


def _content(x: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    import torch

    x = x.detach().cpu().flatten().contiguous()
    if x.numel() and x.stride(0) != 1:  # torch reports single elements as contiguous
        x = x.clone(memory_format=torch.contiguous_format)
    content: memoryview = x.view(torch.uint8).numpy().data
    return content


def read_tensors(
    path: Path, check: Callable[[Header, dict[str, str]], None] = lambda header, metadata: None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata that `write_tensors` wrote.

    check: receives the header and the metadata before any tensor is read, and raises to reject.
    Raises CorruptFileError if the file is missing, invalid, or was changed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            check({k: (x.get_dtype(), tuple(x.get_shape())) for k, x in slices.items()}, metadata)
            # Copies, because tensors of a mapped file may be unaligned. Matrix products round by
            # alignment, so without them a resumed run could differ from an uninterrupted one.
            tensors = {name: file.get_tensor(name).clone() for name in slices}
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is not a readable safetensors file: {error}") from error
    stored = metadata.pop(DIGEST, None)
    if stored is None:
        raise CorruptFileError(f"{path} has no checksum; it was written by another version")
    if stored != _tensors_digest(tensors, metadata):
        raise CorruptFileError(f"{path} is corrupt: its checksum does not match")
    return tensors, metadata


def tensors_digest(tensors: Tensors, fetch: Fetch | None = None) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of tensors.

    fetch: as in `write_tensors`.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(_content(x if fetch is None else fetch(name)))
    return digest.hexdigest()


def _tensors_digest(tensors: Tensors, metadata: dict[str, str], fetch: Fetch | None = None) -> str:
    value = {"tensors": tensors_digest(tensors, fetch), "metadata": metadata}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
