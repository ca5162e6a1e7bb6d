"""Images as tokens: 64x64 pixels in raster order, with red, green and blue of a pixel in a row.

Images come from ImageNet64's npz files or from a folder of images of any format and size.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from transformer_vq.data.paths import (
    SPLITS,
    DataError,
    check_folder,
    error_reason,
    list_files,
    path_kind,
)
from transformer_vq.data.text import reading
from transformer_vq.errors import import_extra
from transformer_vq.progress import warn

SIDE = 64
N_TOKENS = 3 * SIDE * SIDE  # per image
CHUNK = 256  # images read at once
FULL_TRAIN, FULL_TEST = 1_281_167, 50_000  # images in the complete ImageNet64
PAPER_TRAIN = 1_200_000  # the paper trains on the first ones; the rest is validation
N_THREADS = min(os.cpu_count() or 1, 16)


def images_to_tokens(images: np.ndarray) -> np.ndarray:
    """Return tokens [n, 12288] of images [n, 64, 64, 3], both uint8."""
    return images.reshape(-1, N_TOKENS)


def tokens_to_images(tokens: np.ndarray) -> np.ndarray:
    """Return images [n, 64, 64, 3] as uint8. tokens: [n, 12288], integers from 0 to 255."""
    return tokens.astype(np.uint8).reshape(-1, SIDE, SIDE, 3)


@dataclass(frozen=True)
class ImageFiles:
    """Some images of a folder; unreadable ones are empty documents."""

    path: str
    """The folder, for messages."""
    images: tuple[Path, ...]
    split: str | None = None

    def files(self) -> list[Path]:
        return list(self.images)

    def read(self) -> Iterator[list[bytes]]:
        """Yield one document per image. Pillow releases the GIL while it decodes and resizes."""
        failures = []
        with ThreadPoolExecutor(N_THREADS) as pool:
            decoded = pool.map(_decode_or_reason, self.images)
            for file, image in zip(self.images, decoded, strict=True):
                if isinstance(image, str):
                    failures.append(f"{file.relative_to(self.path)} ({image})")
                yield [b"" if isinstance(image, str) else image.tobytes()]
        if failures:
            some = f"{len(failures):,} of {len(self.images):,} images of {self.path}"
            warn(f"{some} cannot be read and are skipped, for example {failures[0]}")


def find_images(root: Path) -> list[ImageFiles]:
    """Return all files with a suffix that Pillow can open; hidden files are skipped."""
    check_folder(root, "--data.path must be a folder of images")
    pil = import_extra("PIL.Image", "decoding images", "pillow")
    suffixes = {end for end, kind in pil.registered_extensions().items() if kind in pil.OPEN}
    files = list_files(root, wanted=lambda name: Path(name).suffix.lower() in suffixes)
    if not files:
        image_edges(0)  # raises an error
    starts = range(0, len(files), CHUNK)
    return [ImageFiles(str(root), tuple(files[i : i + CHUNK])) for i in starts]


def image_edges(n_images: int) -> tuple[int, int]:
    """Return where validation and test start, in bytes: 5% of the images each, at least one."""
    if n_images < 3:
        needed = "train, validation and test need at least one each"
        raise DataError(f"{n_images} readable images, but {needed}; add images")
    held_out = max(1, round(n_images * 0.05))
    return N_TOKENS * (n_images - 2 * held_out), N_TOKENS * (n_images - held_out)


def decode_image(path: Path) -> np.ndarray:
    """Return an image file as RGB [64, 64, 3], uint8.

    The EXIF orientation is applied and transparency becomes white. The image is resized with a box
    filter, as in ImageNet64, without keeping its aspect ratio. Pillow rejects decompression bombs.
    """
    import_extra("PIL.Image", "decoding images", "pillow")
    from PIL import Image, ImageOps

    path_kind(path, "give another image")
    with Image.open(path) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits per channel, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        image = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(image)


def _decode_or_reason(file: Path) -> np.ndarray | str:
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow warns about many unusual files
            return decode_image(file)
    except Exception as error:  # Pillow raises many kinds of errors for corrupt files
        return error_reason(error)


@dataclass(frozen=True)
class ImageNetFile:
    """The images first to last of an npz file of ImageNet64."""

    path: str
    split: str
    first: int
    last: int

    def files(self) -> list[Path]:
        return [Path(self.path)]

    def read(self) -> Iterator[list[bytes]]:
        """Yield one document per image; stored color planes are interleaved to pixels."""
        with _open(Path(self.path)) as (file, _):
            for start in range(0, self.last, CHUNK):  # from 0: zipfile's checksum needs all bytes
                n = min(CHUNK, self.last - start)
                data = file.read(n * N_TOKENS)
                if len(data) < n * N_TOKENS:
                    raise EOFError("it ends too early")
                planes = np.frombuffer(data, dtype=np.uint8).reshape(n, 3, SIDE, SIDE)
                pixels = planes[max(self.first - start, 0) :].transpose(0, 2, 3, 1)
                for tokens in images_to_tokens(np.ascontiguousarray(pixels)):
                    yield [tokens.tobytes()]


def find_imagenet64(root: Path) -> list[ImageNetFile]:
    """Find `train_data_batch_1.npz`, `train_data_batch_2.npz`, ... and `val_data.npz`.

    The official validation set is the test split; the last training images are for validation.
    """
    check_folder(root, "--data.path must be the folder of the ImageNet64 npz files")
    numbered = [(f.stem.rpartition("_")[2], f) for f in root.glob("train_data_batch_*.npz")]
    train = sorted((int(n), file) for n, file in numbered if n.isdecimal() and file.is_file())
    official = root / "val_data.npz"
    if not train or not official.is_file():
        missing = "val_data.npz" if train else "train_data_batch_1.npz"
        raise DataError(f"{missing} is not in {root}; put all ImageNet64 npz files there")
    files = [*(file for _, file in train), official]
    counts = [_count(file) for file in files]
    n_train, n_test = sum(counts[:-1]), counts[-1]
    if (n_train, n_test) != (FULL_TRAIN, FULL_TEST):
        want = f"{FULL_TRAIN:,} + {FULL_TEST:,}: results cannot be compared with published ones"
        warn(f"{root} contains {n_train:,} + {n_test:,} images instead of {want}")
    edges = (0, round(n_train * PAPER_TRAIN / FULL_TRAIN), n_train, n_train + n_test)
    found, start = [], 0
    for file, count in zip(files, counts, strict=True):
        for split, low, high in zip(SPLITS, edges, edges[1:], strict=False):
            first, last = max(low - start, 0), min(high - start, count)
            if first < last:
                found.append(ImageNetFile(str(file), split, first, last))
        start += count
    return found


def _count(path: Path) -> int:
    with reading(path), _open(path) as (_, n_images):
        return n_images


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Yield the array `data` of an npz file, positioned at its first image, and its length."""
    with zipfile.ZipFile(path) as archive:
        if "data.npy" not in archive.namelist():
            raise DataError(f"{path} has no array `data`; it is not an ImageNet64 file")
        with archive.open("data.npy") as file:
            with warnings.catch_warnings(action="ignore"):  # about files written by Python 2
                np.lib.format.read_magic(file)
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            if dtype != np.uint8 or shape[1:] != (N_TOKENS,) or is_fortran:
                found = f"{dtype} {list(shape)} instead of uint8 [n, {N_TOKENS}] in row order"
                raise DataError(f"{path} contains {found}; download the 64x64 version")
            yield file, int(shape[0])
