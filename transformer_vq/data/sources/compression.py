"""Compressed files as streams of decompressed bytes: gzip, bzip2, xz, Zstandard and zip.

`Files` recognizes compression by the first bytes of a file, so that a wrong suffix does not matter.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any

from transformer_vq.data.sources.base import DataError
from transformer_vq.errors import missing_extra

CHUNK = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip")
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_DECOMPRESSED = 1 << 16  # at once: to recognize a file, only its first bytes are needed
_ZSTD_INPUT = 1 << 10  # bounds the output per step: repetitive data shrinks up to 30,000 times
_ZSTD_WINDOW = 1 << 31  # as written by `zstd --long=31`
_MAGIC = {".gz": b"\x1f\x8b\x08", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_BZIP2 = re.compile(rb"BZh[1-9]")
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # the first block, or the end
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # the second one starts an empty archive
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # starts with the UTF-16 mark, so it comes first
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def compression_of(head: bytes) -> str | None:
    """Return the suffix of the compression that a file's first 10 bytes show, such as ".gz"."""
    for suffix, magic in _MAGIC.items():
        if head.startswith(magic):
            return suffix
    if _ZSTD_SKIPPABLE.match(head):
        return ".zst"
    # Three letters may also start a text; a file that was cut short may end within the signature.
    if _BZIP2.match(head) and any(block.startswith(head[4:10]) for block in _BZIP2_BLOCKS):
        return ".bz2"
    return ".zip" if head.startswith(_ZIP) else None


class Files:
    """Opens files and members of zip archives; keeps the last archive open.

    An archive may have thousands of members, and opening it reads the list of all of them.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._archive: zipfile.ZipFile | None = None

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._close()

    def open(self, path: Path, member: str | None = None) -> IO[bytes]:
        """Open a file, or a member of a zip archive, as a stream of decompressed bytes.

        member: None opens the only file of an archive.
        Raises one of `paths.READ_ERRORS`, here or while the stream is read, if it is corrupt.
        """
        file = open(path, "rb") if member is None else self.archive(path).open(member)  # noqa: SIM115
        try:
            head = file.read(10)
            file.seek(0)
            suffix = compression_of(head)
            if suffix is None:
                return file
            if suffix == ".zip" and member is None:
                file.close()
                return self.open(path, only_member(self.archive(path)))
            if suffix == ".zip":
                raise DataError(f"{path}/{member} is an archive; extract it first")
            if suffix == ".zst":
                return _Decompressed(file, _zstd_chunks(file))
            return _Decompressed(file, read_chunks(_OPENERS[suffix](file), _DECOMPRESSED))
        except BaseException:
            file.close()
            raise

    def archive(self, path: Path) -> zipfile.ZipFile:
        """Return an open zip archive; it stays open until another one is requested."""
        if self._archive is None or self._path != path:
            self._close()
            self._archive, self._path = zipfile.ZipFile(path), path
        return self._archive

    def _close(self) -> None:
        if self._archive is not None:
            self._archive.close()
        self._archive = self._path = None


def members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files of a zip archive that are not hidden, sorted by name."""
    return sorted(filter(_is_visible, archive.infolist()), key=lambda info: info.filename)


def only_member(archive: zipfile.ZipFile) -> str:
    """Return the name of the only file of an archive. Raises BadZipFile if there are others."""
    found = members(archive)
    if len(found) != 1:
        raise zipfile.BadZipFile(f"it contains {len(found)} files instead of one")
    return found[0].filename


def _is_visible(info: zipfile.ZipInfo) -> bool:
    hidden = (x for x in PurePosixPath(info.filename).parts if x.startswith(".") and x != "..")
    return not info.is_dir() and not any(hidden) and not info.filename.startswith("__MACOSX/")


class ChunkStream(io.RawIOBase):
    """A stream of the bytes that an iterator yields. Chunks must not be empty."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        rest = self._rest or memoryview(next(self._chunks, b""))
        n = min(len(rest), len(buffer))
        buffer[:n], self._rest = rest[:n], rest[n:]
        return n


class _Decompressed(io.BufferedReader):
    """The decompressed bytes of a file, which is closed together with the stream."""

    def __init__(self, file: IO[bytes], chunks: Iterator[bytes]) -> None:
        super().__init__(ChunkStream(chunks), _DECOMPRESSED)
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def read_chunks(stream: IO[bytes], size: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a stream, at most `size` at once; by default 1 MB."""
    while data := stream.read(size or CHUNK):
        yield data


def encoding_of(head: bytes) -> tuple[bytes, str]:
    """Return the byte order mark that text starts with, or b"", and the encoding of the text."""
    return next((x for x in _ENCODINGS if head.startswith(x[0])), (b"", "utf-8"))


def utf8_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield text without its byte order mark, converted to UTF-8 if the mark says UTF-16 or 32.

    Other bytes are not changed, even if they are not valid UTF-8.
    """
    head = stream.read(4)
    mark, encoding = encoding_of(head)
    if encoding == "utf-8":
        if head := head.removeprefix(mark) + stream.read(CHUNK - len(head)):
            yield head
        yield from read_chunks(stream)
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    text = decoder.decode(head[len(mark) :])
    for data in read_chunks(stream, CHUNK // 2):  # UTF-8 may be longer
        if text := text + decoder.decode(data):
            yield text.encode()
            text = ""
    if text := text + decoder.decode(b"", final=True):
        yield text.encode()


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing_extra("a .zst file", "zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    # Frame by frame, because the library's own stream ends silently where a file was cut short.
    frame = None
    data = b""
    try:
        while data := data or file.read(_ZSTD_INPUT):
            frame = frame or decompressor.decompressobj()
            if out := frame.decompress(data):
                yield out
            data = frame.unused_data
            if frame.eof:
                frame = None
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("the file ended within a compressed frame")


def decompressed_size(path: Path) -> int:
    """Return how many bytes a file has when it is decompressed; it is then read completely.

    Raises one of `paths.READ_ERRORS` if it is corrupt. A zip archive must contain one file.
    """
    with open(path, "rb") as file:
        if compression_of(file.read(10)) is None:
            return path.stat().st_size
    with Files() as files, files.open(path) as stream:
        return sum(map(len, read_chunks(stream)))
