"""enwik8: the first 100,000,000 bytes of a Wikipedia dump, its splits and its download."""

from __future__ import annotations

import http.client
import os
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.compression import CHUNK, decompressed_size
from transformer_vq.data.sources.paths import READ_ERRORS, error_reason, path_kind
from transformer_vq.files import PARTIAL, CorruptFileError, file_digest
from transformer_vq.progress import progress_bar, warn

URL = "http://mattmahoney.net/dc/enwik8.zip"
ZIP_SIZE = 36_445_475
ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
SIZE = 100_000_000
EDGES = (90_000_000, 95_000_000)
NAMES = ("enwik8", "enwik8.zip", "enwik8.xz", "enwik8.gz", "enwik8.bz2")
TIMEOUT = 30.0  # seconds without a byte


def enwik8_file(path: Path | None, cache: Path) -> tuple[Path, int]:
    """Return the file with enwik8, compressed or not, and its decompressed size.

    path: the file or its folder; None uses the file that `download` saved. Warns if the size is not
    that of enwik8: the file is then split in the same proportions.
    """
    file = _find_file(path, cache)
    try:
        size = decompressed_size(file)
    except READ_ERRORS as error:
        raise DataError(
            f"cannot read {file}: {error_reason(error)}; it may be incomplete, copy or download it "
            "again"
        ) from error
    if size != SIZE:
        warn(
            f"{file} has {size:,} bytes instead of the {SIZE:,} of enwik8: results cannot be "
            "compared with published ones"
        )
    return file, size


def download(cache: Path, url: str = URL, size: int = ZIP_SIZE, sha256: str = ZIP_SHA256) -> Path:
    """Download enwik8.zip to the cache and return its path.

    Does nothing if an intact copy exists, and resumes an interrupted download. A corrupt copy is
    replaced, with a warning. Raises DataError if the download fails.
    """
    target = _download_path(cache)
    if _is_intact(target, sha256):
        return target
    if os.path.lexists(target):
        warn(f"{target} is not the published enwik8.zip; downloading it again")
    partial = target.with_name(f"{target.name}{PARTIAL}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _resume_download(url, partial, size)
        digest = file_digest(partial)
        if digest == sha256:
            os.replace(partial, target)
            return target
        partial.unlink()
    except (OSError, CorruptFileError, http.client.HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it keeps the connection open
        raise DataError(
            f"cannot download {url}: {str(error) or type(error).__name__}; run the command again "
            "to resume, or give a local file as --data.path"
        ) from error
    raise DataError(
        f"{url} is not the published enwik8.zip (SHA-256 {digest}) and was deleted; run the "
        "command again, or give a local file as --data.path"
    )


def _find_file(path: Path | None, cache: Path) -> Path:
    if path is None:
        file = _download_path(cache)
        if not os.path.lexists(file):
            raise DataError(
                "enwik8 is not downloaded; run `tvq prepare enwik8` or give a file as --data.path"
            )
        if not _is_intact(file, ZIP_SHA256):
            raise DataError(
                f"{file} is corrupt or not the published enwik8.zip; delete it and run "
                "`tvq prepare enwik8`"
            )
        return file
    if path_kind(path, "--data.path must be enwik8 or enwik8.zip") == "file":
        return path
    found = [path / name for name in NAMES if (path / name).is_file()]
    if not found:
        raise DataError(f"{path} contains neither enwik8 nor enwik8.zip; give another --data.path")
    return found[0]


def _download_path(cache: Path) -> Path:
    return cache / "downloads" / "enwik8.zip"


def _is_intact(file: Path, sha256: str) -> bool:
    try:
        return file.is_file() and file_digest(file) == sha256
    except (OSError, CorruptFileError):
        return False


def _resume_download(url: str, partial: Path, size: int) -> None:
    """Append the missing bytes; start again if the server does not support ranges."""
    if partial.is_symlink() or not partial.is_file():
        partial.unlink(missing_ok=True)  # never write through a link
    done = partial.stat().st_size if partial.is_file() else 0
    if done >= size:
        return
    request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urlopen(request, timeout=TIMEOUT) as response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        done = done if resumed else 0
        with (
            open(partial, "ab" if resumed else "wb", opener=_open_no_link) as file,
            progress_bar("downloading enwik8", size, "B", done) as advance,
        ):
            while done < size and (data := response.read(CHUNK)):
                file.write(data)
                done += len(data)
                advance(len(data))
    if done < size:
        raise OSError(f"the connection closed after {done:,} of {size:,} bytes")


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
