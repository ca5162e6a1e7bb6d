"""Folders of any images: each is squashed to 64x64 pixels, its tokens in ImageNet64's order."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import (
    Chunk,
    DataError,
    check_folder,
    files_in,
    reason,
    stat_of,
)
from transformer_vq.data.sources.imagenet64 import N_TOKENS, SIDE, split_range
from transformer_vq.data.sources.text import mixed
from transformer_vq.errors import missing_extra
from transformer_vq.progress import progress_bar, warn

HELD_OUT_SHARE = 0.05  # of all images, for validation and again for test
CHUNK = 1024  # images that threads are given at once; what is decoded waits in memory
N_THREADS = min(os.cpu_count() or 1, 16)


@dataclass
class ImageFolder:
    """The images below a folder, a document each, in an order that mixes them."""

    root: Path
    files: tuple[Path, ...]
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False
    _rows: np.ndarray | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, root: Path) -> ImageFolder:
        """All files whose names end as those of Pillow's formats do; hidden ones are left out."""
        check_folder(root, "--data.path must be a folder of images")
        endings = _image_endings()
        found = files_in(root, wanted=lambda name: Path(name).suffix.lower() in endings)
        files = mixed(root, found)
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
        """Decode all into a nameless file, since only readable images count in the split."""
        n_files, failures = len(self.files), []
        with (
            tempfile.TemporaryFile(dir=folder.parent) as rows,
            warnings.catch_warnings(action="ignore"),  # Pillow has much to say about odd files
            closing(_decode_all(self.files)) as decoded,
            progress_bar("decoding", n_files, "images") as advance,
        ):
            for file, image in zip(self.files, decoded, strict=True):
                if isinstance(image, str):
                    failures.append(f"{file.relative_to(self.root)} ({image})")
                else:
                    rows.write(image.tobytes())
                advance(1)
            rows.flush()
            if len(failures) < n_files:
                self._rows = np.memmap(rows, np.uint8, "r").reshape(-1, N_TOKENS)
        if failures:
            what = f"{len(failures):,} of {n_files:,} images below {self.root}"
            warn(f"{what} cannot be read and are left out, the first is {failures[0]}")
        _check_enough(n_files - len(failures), self.root)

    def chunks(self, split: str) -> Iterator[Chunk]:
        if self._rows is None:
            raise RuntimeError("setup() decodes the images; call it before chunks()")
        n = len(self._rows)
        held_out = max(1, round(n * HELD_OUT_SHARE))
        low, high = split_range(split, (n - 2 * held_out, n - held_out), n)
        for tokens in self._rows[low:high]:
            yield Chunk(tokens, True, N_TOKENS)


def decode(path: Path) -> np.ndarray:
    """A image as RGB [64, 64, 3]: the way up it was taken, on white, squashed as ImageNet64 is.

    Note: images of a size that Pillow takes for an attack are refused.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_extra("decoding images", "Pillow", "image") from None
    with Image.open(path) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits a pixel, which would be cut off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(image)


def _decode_all(files: Sequence[Path]) -> Generator[np.ndarray | str, None, None]:
    """The images in the order of their files, each decoded or the reason why it cannot be.

    Threads are enough: Pillow leaves the interpreter to others while it decodes and resizes.
    """
    with ThreadPoolExecutor(N_THREADS) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(_decode_or_reason, files[start : start + CHUNK])


def _decode_or_reason(file: Path) -> np.ndarray | str:
    try:
        return decode(file)
    except Exception as error:  # broken files make Pillow raise errors of almost any kind
        return reason(error)


def _image_endings() -> set[str]:
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("decoding images", "Pillow", "image") from None
    return {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}


def _check_enough(n_images: int, root: Path) -> None:
    if n_images < 3:
        need = "train, validation and test need at least one each"
        raise DataError(f"readable images below {root}: {n_images}, but {need}")
