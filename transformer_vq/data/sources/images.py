"""A folder of images of any format and size, each one resized to 64x64 pixels."""

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

from transformer_vq.data.sources.base import SPLITS, Chunk, DataError, split_range
from transformer_vq.data.sources.paths import (
    check_folder,
    error_reason,
    file_fingerprint,
    hash_order,
    list_files,
)
from transformer_vq.data.sources.pixels import N_TOKENS, SIDE
from transformer_vq.errors import missing_extra
from transformer_vq.progress import progress_bar, warn

HELD_OUT_SHARE = 0.05  # of all images, for validation and again for test
CHUNK = 1024  # images submitted to the threads at once; bounds the decoded images in memory
N_THREADS = min(os.cpu_count() or 1, 16)


@dataclass
class ImageFolder:
    """The images below a folder, one document per image, in a fixed pseudorandom order."""

    root: Path
    files: tuple[Path, ...]
    vocab_size: int = 256
    bos: int = 0
    has_words: bool = False
    splits: tuple[str, ...] = SPLITS
    _rows: np.ndarray | None = field(default=None, init=False, repr=False)
    """Tokens of all readable images, [n, 12288]; None until `setup` has decoded them."""

    @classmethod
    def from_folder(cls, root: Path) -> ImageFolder:
        """Find all files with a suffix that Pillow can open; hidden files are skipped."""
        check_folder(root, "--data.path must be a folder of images")
        suffixes = _image_suffixes()
        found = list_files(root, wanted=lambda name: Path(name).suffix.lower() in suffixes)
        files = hash_order(root, found)
        _check_enough(len(files), root)
        return cls(root, tuple(files))

    @property
    def n_bytes(self) -> int:
        return N_TOKENS * len(self.files if self._rows is None else self._rows)

    def fingerprint(self) -> list[object]:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(repr(file_fingerprint(file, self.root)).encode())
        return [len(self.files), digest.hexdigest()]

    def setup(self, folder: Path, work: Path) -> None:
        """Decode all images into an unnamed file, because only readable images are split."""
        n_files, failures = len(self.files), []
        with (
            tempfile.TemporaryFile(dir=folder.parent) as rows,
            warnings.catch_warnings(action="ignore"),  # Pillow warns about many unusual files
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
            warn(
                f"{len(failures):,} of {n_files:,} images below {self.root} cannot be read and are "
                f"skipped, for example {failures[0]}"
            )
        _check_enough(n_files - len(failures), self.root)

    def chunks(self, split: str) -> Iterator[Chunk]:
        if self._rows is None:
            raise RuntimeError("setup() decodes the images; call it before chunks()")
        n = len(self._rows)
        held_out = max(1, round(n * HELD_OUT_SHARE))
        low, high = split_range(split, (n - 2 * held_out, n - held_out), n)
        for tokens in self._rows[low:high]:
            yield Chunk(tokens, True, N_TOKENS)


def decode_image(path: Path) -> np.ndarray:
    """Return an image file as RGB [64, 64, 3], uint8.

    The EXIF orientation is applied and transparency becomes white. The image is resized with a box
    filter, as in ImageNet64, without keeping its aspect ratio.
    Note: Pillow raises an error for extremely large images (decompression bombs).
    """
    _require_pillow()
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits per channel, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(image)


def _decode_all(files: Sequence[Path]) -> Generator[np.ndarray | str, None, None]:
    """Yield each image in the order of the files, or the reason why it cannot be decoded.

    Threads are sufficient: Pillow releases the GIL while it decodes and resizes.
    """
    with ThreadPoolExecutor(N_THREADS) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(_decode_or_reason, files[start : start + CHUNK])


def _decode_or_reason(file: Path) -> np.ndarray | str:
    try:
        return decode_image(file)
    except Exception as error:  # Pillow raises many kinds of errors for corrupt files
        return error_reason(error)


def _image_suffixes() -> set[str]:
    _require_pillow()
    from PIL import Image

    return {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise missing_extra("decoding images", "pillow") from None


def _check_enough(n_images: int, root: Path) -> None:
    if n_images < 3:
        raise DataError(
            f"{root} contains {n_images} readable images, but train, validation and test need at "
            "least one each; add images or give another --data.path"
        )
