"""Pictures of 64x64 pixels as 12,288 tokens: row by row, red, green and blue of a pixel together.

Downsampled ImageNet in the npz batches it is published in, and folders of any pictures.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from transformer_vq.data.source import DataError, Piece, stat_of
from transformer_vq.data.text import _hidden, _mixed
from transformer_vq.progress import progress_bar, warn

SIDE = 64
N_TOKENS = 3 * SIDE * SIDE
CHUNK = 256  # pictures read at once from an npz file
FULL_TRAIN, FULL_TEST = 1_281_167, 50_000  # pictures of the whole ImageNet64
PAPER_TRAIN = 1_200_000  # the first ones, on which the paper trains; the rest is validation
HELD_OUT_SHARE = 0.05  # of a folder of pictures, for validation and again for test
BATCH = 8  # pictures a process is given at once
FEW = 500  # pictures that are decoded before processes would have started
_READ_ERRORS = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def to_tokens(pictures: np.ndarray) -> np.ndarray:
    """pictures: [n, 64, 64, 3] uint8. Returns [n, 12288]."""
    if pictures.shape[1:] != (SIDE, SIDE, 3) or pictures.dtype != np.uint8:
        got = f"{pictures.dtype} {list(pictures.shape)}"
        raise ValueError(f"pictures must be uint8 [n, {SIDE}, {SIDE}, 3], not {got}")
    return pictures.reshape(-1, N_TOKENS)


def to_pictures(tokens: np.ndarray) -> np.ndarray:
    """tokens: [n, 12288], whole numbers from 0 to 255. Returns [n, 64, 64, 3] uint8."""
    if tokens.shape[1:] != (N_TOKENS,):
        raise ValueError(f"tokens must be [n, {N_TOKENS}], not {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > 255):
        raise ValueError("tokens of pictures must be from 0 to 255")
    return tokens.astype(np.uint8).reshape(-1, SIDE, SIDE, 3)


@dataclass(frozen=True)
class ImageNet64:
    """Downsampled ImageNet 64x64, a document per picture.

    Its validation set is the test split; validation is the end of its training set.
    """

    root: Path
    files: tuple[Path, ...]
    """The training batches in their order, then the official validation set."""
    counts: tuple[int, ...]
    edges: tuple[int, int]
    """Where validation and test begin, counted in pictures over all files together."""
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False

    @classmethod
    def of(cls, root: Path) -> ImageNet64:
        """A folder with `train_data_batch_1.npz` and so on and `val_data.npz`."""
        _check_folder(root, "the npz files of ImageNet64")
        numbered = [(f.stem.rpartition("_")[2], f) for f in root.glob("train_data_batch_*.npz")]
        batches = sorted((int(number), file) for number, file in numbered if number.isdecimal())
        official = root / "val_data.npz"
        if not batches or not official.is_file():
            missing = "val_data.npz" if batches else "train_data_batch_1.npz"
            raise DataError(f"{missing} is not in {root}; put all npz files of ImageNet64 there")
        files = (*(file for _, file in batches), official)
        counts = tuple(_count(file) for file in files)
        n_train, n_test = sum(counts[:-1]), counts[-1]
        if (n_train, n_test) != (FULL_TRAIN, FULL_TEST):
            warn(
                f"{root} holds {n_train:,} + {n_test:,} pictures, not {FULL_TRAIN:,} + "
                f"{FULL_TEST:,}: figures cannot be compared with published ones"
            )
        return cls(root, files, counts, (round(n_train * PAPER_TRAIN / FULL_TRAIN), n_train))

    @property
    def n_bytes(self) -> int:
        return N_TOKENS * sum(self.counts)

    def fingerprint(self) -> list[object]:
        return [[stat_of(file, self.root) for file in self.files], list(self.edges)]

    def setup(self, folder: Path) -> None:
        """Colours are tokens as they are."""

    def pieces(self, split: str) -> Iterator[Piece]:
        low, high = _range(split, self.edges, sum(self.counts))
        start = 0
        for file, count in zip(self.files, self.counts, strict=True):
            for tokens in _read(file, max(low - start, 0), min(high - start, count)):
                yield Piece(tokens, True, N_TOKENS)
            start += count


def _read(path: Path, first: int, last: int) -> Iterator[np.ndarray]:
    """Tokens of pictures first to last; planes of red, green and blue become pixels."""
    if first >= last:
        return
    with _open(path) as (file, _):
        for start in range(0, last, CHUNK):  # from 0, since a checksum needs the whole file
            n = min(CHUNK, last - start)
            data = file.read(n * N_TOKENS)
            if len(data) < n * N_TOKENS:
                raise EOFError("it ends too early")
            planes = np.frombuffer(data, dtype=np.uint8).reshape(n, 3, SIDE, SIDE)
            yield from to_tokens(planes[max(first - start, 0) :].transpose(0, 2, 3, 1))


def _count(path: Path) -> int:
    with _open(path) as (_, n_pictures):
        return n_pictures


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The array `data` of an npz file from its first byte on, and the number of its pictures."""
    try:
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                raise DataError(f"{path} holds no array `data`: it is no file of ImageNet64")
            with archive.open("data.npy") as file:
                yield file, _read_header(file, path)
    except _READ_ERRORS as error:
        why = str(error) or type(error).__name__
        raise DataError(f"cannot read {path}: {why}; copy or fetch it again") from error


def _read_header(file: IO[bytes], path: Path) -> int:
    """How many pictures follow."""
    try:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, in_columns, dtype = np.lib.format.read_array_header_2_0(file)
    except ValueError as error:
        raise EOFError("the header of its array is broken") from error
    if dtype != np.uint8 or shape[1:] != (N_TOKENS,) or in_columns:
        order = " in column order" if in_columns else ""
        raise DataError(
            f"{path} holds {dtype} {list(shape)}{order}, not uint8 [n, {N_TOKENS}] as the set of "
            "64x64 pictures does; other sizes are not supported"
        )
    return int(shape[0])


@dataclass
class Pictures:
    """The pictures below a folder, a document each, in an order that mixes them."""

    root: Path
    files: tuple[Path, ...]
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False
    _rows: np.ndarray | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, root: Path) -> Pictures:
        """All files whose names end as those of Pillow's formats do; hidden ones are left out."""
        _check_folder(root, "pictures")
        endings = _picture_endings()
        files = [f for f in root.rglob("*") if f.suffix.lower() in endings and f.is_file()]
        files = _mixed(root, [f for f in files if not _hidden(f.relative_to(root))])
        _check_enough(len(files), root)
        return cls(root, tuple(files))

    @property
    def n_bytes(self) -> int:
        return N_TOKENS * len(self.files if self._rows is None else self._rows)

    def fingerprint(self) -> list[object]:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(repr(stat_of(file, self.root)).encode())
        return [len(self.files), digest.hexdigest()]

    def setup(self, folder: Path) -> None:
        """Decode all into a nameless file, since only readable pictures count in the split."""
        n_files, failures = len(self.files), []
        with (
            tempfile.TemporaryFile(dir=folder.parent) as rows,
            closing(_decode_all(self.files)) as decoded,
            progress_bar("decoding", n_files, "pictures") as advance,
        ):
            for file, picture in zip(self.files, decoded, strict=True):
                if isinstance(picture, str):
                    failures.append(f"{file.relative_to(self.root)} ({picture})")
                else:
                    rows.write(picture.tobytes())
                advance(1)
            rows.flush()
            if len(failures) < n_files:
                self._rows = np.memmap(rows, np.uint8, "r").reshape(-1, N_TOKENS)
        if failures:
            what = f"{len(failures):,} of {n_files:,} pictures below {self.root}"
            warn(f"{what} cannot be read and are left out, the first is {failures[0]}")
        _check_enough(n_files - len(failures), self.root)

    def pieces(self, split: str) -> Iterator[Piece]:
        if self._rows is None:
            raise RuntimeError("setup() decodes the pictures; call it before pieces()")
        n = len(self._rows)
        held_out = max(1, round(n * HELD_OUT_SHARE))
        low, high = _range(split, (n - 2 * held_out, n - held_out), n)
        for tokens in self._rows[low:high]:
            yield Piece(tokens, True, N_TOKENS)


def decode(path: Path) -> np.ndarray:
    """A picture as RGB [64, 64, 3]: the way up it was taken, on white, squashed as ImageNet64 is.

    Note: pictures of a size that Pillow takes for an attack are refused.
    """
    from PIL import Image, ImageOps

    with warnings.catch_warnings(action="ignore"), Image.open(path) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I"):  # 16 bits a pixel, which would be cut off at 255
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        picture = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(picture)


def _decode_all(files: Sequence[Path]) -> Generator[np.ndarray | str, None, None]:
    """The pictures in the order of their files, each decoded or the reason why it cannot be."""
    if len(files) < FEW:
        yield from map(_decode_or_reason, files)
        return
    n_workers = min(os.cpu_count() or 1, 16)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, context, initializer=_begin_process)
    waiting: deque[Future[list[np.ndarray | str]]] = deque()
    try:
        for start in range(0, len(files), BATCH):
            waiting.append(pool.submit(_decode_batch, files[start : start + BATCH]))
            if len(waiting) > 4 * n_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        why = "out of memory, or a script without `if __name__ == '__main__':`"
        raise DataError(f"a process that decodes pictures has died: {why}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    """Ctrl-C ends a process without a traceback, and none outlives the one that began it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _decode_batch(files: Sequence[Path]) -> list[np.ndarray | str]:
    return [_decode_or_reason(file) for file in files]


def _decode_or_reason(file: Path) -> np.ndarray | str:
    try:
        return decode(file)
    except Exception as error:  # broken files make Pillow raise errors of almost any kind
        return str(error) or type(error).__name__


def _picture_endings() -> set[str]:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("pictures need Pillow: pip install 'transformer-vq[image]'") from error
    return {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}


def _check_folder(root: Path, of_what: str) -> None:
    if not root.is_dir():
        raise DataError(f"{root} is no folder; data.path must be the folder of {of_what}")


def _check_enough(n_pictures: int, root: Path) -> None:
    if n_pictures < 3:
        need = "train, validation and test need at least one each"
        raise DataError(f"readable pictures below {root}: {n_pictures}, but {need}")


def _range(split: str, edges: tuple[int, int], total: int) -> tuple[int, int]:
    return {"train": (0, edges[0]), "validation": edges, "test": (edges[1], total)}[split]
