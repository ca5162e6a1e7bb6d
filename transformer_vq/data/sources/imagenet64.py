"""ImageNet64: downsampled ImageNet, read from the npz files in which it is published."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from transformer_vq.data.sources.base import SPLITS, Chunk, DataError, file_ranges
from transformer_vq.data.sources.paths import (
    READ_ERRORS,
    check_folder,
    error_reason,
    file_fingerprint,
    path_kind,
)
from transformer_vq.data.sources.pixels import N_TOKENS, SIDE, images_to_tokens
from transformer_vq.progress import warn

CHUNK = 256  # images read at once from an npz file
FULL_TRAIN, FULL_TEST = 1_281_167, 50_000  # images in the complete dataset
PAPER_TRAIN = 1_200_000  # the paper trains on the first ones; the rest is validation


@dataclass(frozen=True)
class ImageNet64:
    """ImageNet64, one document per image.

    The official validation set is the test split. The last images of the training set are the
    validation split.
    """

    root: Path
    files: tuple[Path, ...]
    """The training files in numerical order, then the official validation set."""
    counts: tuple[int, ...]
    """Images per file."""
    edges: tuple[int, int]
    """Where validation and test start, counted in images over all files."""
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False
    splits: tuple[str, ...] = SPLITS

    @classmethod
    def from_folder(cls, root: Path) -> ImageNet64:
        """Find `train_data_batch_1.npz`, `train_data_batch_2.npz`, ... and `val_data.npz`."""
        check_folder(root, "--data.path must be the folder of the ImageNet64 npz files")
        numbered = [(f.stem.rpartition("_")[2], f) for f in root.glob("train_data_batch_*.npz")]
        train = sorted((int(number), file) for number, file in numbered if number.isdecimal())
        official = root / "val_data.npz"
        if not train or not official.is_file():
            missing = "val_data.npz" if train else "train_data_batch_1.npz"
            raise DataError(f"{missing} is not in {root}; put all ImageNet64 npz files there")
        files = (*(file for _, file in train), official)
        counts = tuple(_count(file) for file in files)
        n_train, n_test = sum(counts[:-1]), counts[-1]
        if (n_train, n_test) != (FULL_TRAIN, FULL_TEST):
            warn(
                f"{root} contains {n_train:,} + {n_test:,} images instead of {FULL_TRAIN:,} + "
                f"{FULL_TEST:,}: results cannot be compared with published ones"
            )
        return cls(root, files, counts, (round(n_train * PAPER_TRAIN / FULL_TRAIN), n_train))

    @property
    def n_bytes(self) -> int:
        return N_TOKENS * sum(self.counts)

    def fingerprint(self) -> list[object]:
        return [[file_fingerprint(file, self.root) for file in self.files], list(self.edges)]

    def setup(self, folder: Path, work: Path) -> None:
        """Do nothing: color values are tokens already."""

    def chunks(self, split: str) -> Iterator[Chunk]:
        for index, first, last in file_ranges(split, self.edges, self.counts):
            for tokens in _read(self.files[index], first, last):
                yield Chunk(tokens, True, N_TOKENS)


def _read(path: Path, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield the tokens of images first to last; stored color planes are interleaved to pixels."""
    with _open(path) as (file, _):
        for start in range(0, last, CHUNK):  # from 0, because zipfile's checksum needs all bytes
            n = min(CHUNK, last - start)
            data = file.read(n * N_TOKENS)
            if len(data) < n * N_TOKENS:
                raise EOFError("it ends too early")
            planes = np.frombuffer(data, dtype=np.uint8).reshape(n, 3, SIDE, SIDE)
            yield from images_to_tokens(planes[max(first - start, 0) :].transpose(0, 2, 3, 1))


def _count(path: Path) -> int:
    with _open(path) as (_, n_images):
        return n_images


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Yield the array `data` of an npz file, positioned at its first image, and its length."""
    fix = "copy or download it again"
    try:
        if path_kind(path, fix) != "file":
            raise DataError(f"{path} is a folder, not an npz file; {fix}")
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                raise DataError(f"{path} has no array `data`; it is not an ImageNet64 file")
            with archive.open("data.npy") as file:
                n_images = _read_header(file, path)
                if file.tell() + n_images * N_TOKENS != archive.getinfo("data.npy").file_size:
                    raise EOFError("the size of its array does not match its header")
                yield file, n_images
    except DataError:
        raise
    except READ_ERRORS as error:
        raise DataError(f"cannot read {path}: {error_reason(error)}; {fix}") from error


def _read_header(file: IO[bytes], path: Path) -> int:
    """Return the number of images that follow."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about files written by Python 2
            if np.lib.format.read_magic(file) == (1, 0):
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # numpy parses Python literals, which can raise many kinds of errors
        raise EOFError("the header of its array is corrupt") from error
    if dtype != np.uint8 or shape[1:] != (N_TOKENS,) or is_fortran:
        order = " in column order" if is_fortran else ""
        raise DataError(
            f"{path} contains {dtype} {list(shape)}{order} instead of uint8 [n, {N_TOKENS}]; "
            "download the 64x64 version, other sizes are not supported"
        )
    return int(shape[0])
