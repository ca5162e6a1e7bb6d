"""Images of 64x64 pixels as 12,288 tokens: row by row, red, green and blue of a pixel together.

Downsampled ImageNet in the npz batches it is published in.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from transformer_vq.data.sources.base import (
    READ_ERRORS,
    Chunk,
    DataError,
    check_folder,
    kind_of,
    reason,
    stat_of,
)
from transformer_vq.progress import warn

SIDE = 64
N_TOKENS = 3 * SIDE * SIDE
CHUNK = 256  # images read at once from an npz file
FULL_TRAIN, FULL_TEST = 1_281_167, 50_000  # images of the whole ImageNet64
PAPER_TRAIN = 1_200_000  # the first ones, on which the paper trains; the rest is validation


def to_tokens(images: np.ndarray) -> np.ndarray:
    """images: [n, 64, 64, 3] uint8. Returns [n, 12288]."""
    if images.shape[1:] != (SIDE, SIDE, 3) or images.dtype != np.uint8:
        got = f"{images.dtype} {list(images.shape)}"
        raise ValueError(f"images must be uint8 [n, {SIDE}, {SIDE}, 3], not {got}")
    return images.reshape(-1, N_TOKENS)


def to_images(tokens: np.ndarray) -> np.ndarray:
    """tokens: [n, 12288], whole numbers from 0 to 255. Returns [n, 64, 64, 3] uint8."""
    if tokens.shape[1:] != (N_TOKENS,):
        raise ValueError(f"tokens must be [n, {N_TOKENS}], not {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > 255):
        raise ValueError("tokens of images must be from 0 to 255")
    return tokens.astype(np.uint8).reshape(-1, SIDE, SIDE, 3)


@dataclass(frozen=True)
class ImageNet64:
    """Downsampled ImageNet 64x64, a document per image.

    Its validation set is the test split; validation is the end of its training set.
    """

    root: Path
    files: tuple[Path, ...]
    """The training batches in their order, then the official validation set."""
    counts: tuple[int, ...]
    edges: tuple[int, int]
    """Where validation and test begin, counted in images over all files together."""
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False

    @classmethod
    def of(cls, root: Path) -> ImageNet64:
        """A folder with `train_data_batch_1.npz` and so on and `val_data.npz`."""
        check_folder(root, "--data.path must be the folder of the npz files of ImageNet64")
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
                f"{root} holds {n_train:,} + {n_test:,} images, not {FULL_TRAIN:,} + "
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

    def chunks(self, split: str) -> Iterator[Chunk]:
        low, high = split_range(split, self.edges, sum(self.counts))
        start = 0
        for file, count in zip(self.files, self.counts, strict=True):
            for tokens in _read(file, max(low - start, 0), min(high - start, count)):
                yield Chunk(tokens, True, N_TOKENS)
            start += count


def _read(path: Path, first: int, last: int) -> Iterator[np.ndarray]:
    """Tokens of images first to last; planes of red, green and blue become pixels."""
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
    with _open(path) as (_, n_images):
        return n_images


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The array `data` of an npz file from its first byte on, and the number of its images."""
    fix = "copy or download it again"
    try:
        if kind_of(path, fix) != "file":
            raise DataError(f"{path} is a folder, not an npz file; {fix}")
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                raise DataError(f"{path} has no array `data`; it is not a file of ImageNet64")
            with archive.open("data.npy") as file:
                n_images = _read_header(file, path)
                if file.tell() + n_images * N_TOKENS != archive.getinfo("data.npy").file_size:
                    raise EOFError("its array does not have the size that its header gives")
                yield file, n_images
    except DataError:
        raise
    except READ_ERRORS as error:
        raise DataError(f"cannot read {path}: {reason(error)}; {fix}") from error


def _read_header(file: IO[bytes], path: Path) -> int:
    """How many images follow."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about files written by Python 2
            if np.lib.format.read_magic(file) == (1, 0):
                shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, in_columns, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # a header is a Python literal: numpy raises what its parser does
        raise EOFError("the header of its array is corrupt") from error
    if dtype != np.uint8 or shape[1:] != (N_TOKENS,) or in_columns:
        order = " in column order" if in_columns else ""
        raise DataError(
            f"{path} holds {dtype} {list(shape)}{order}, not uint8 [n, {N_TOKENS}] as the set of "
            "64x64 images does; other sizes are not supported"
        )
    return int(shape[0])


def split_range(split: str, edges: tuple[int, int], total: int) -> tuple[int, int]:
    """Where a split begins and ends; `edges`: where validation and test begin."""
    return {"train": (0, edges[0]), "validation": edges, "test": (edges[1], total)}[split]
