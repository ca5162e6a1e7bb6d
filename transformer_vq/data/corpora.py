"""Datasets by name: what is read for each of them, and the download of enwik8."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from transformer_vq.config import LEARNED, DataConfig
from transformer_vq.data.images import ImageFiles, ImageNetFile, find_imagenet64, find_images
from transformer_vq.data.paths import (
    SPLITS,
    DataError,
    check_folder,
    error_reason,
    list_files,
    path_kind,
)
from transformer_vq.data.text import Input, find_inputs, python_sources, reading
from transformer_vq.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from transformer_vq.files import CorruptFileError, file_digest
from transformer_vq.progress import info

URL = "http://mattmahoney.net/dc/enwik8.zip"
ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
DOWNLOAD = "downloads/enwik8.zip"  # in the cache
SIZE = 100_000_000
DEFAULT_VOCAB_SIZE = 8_192


Readable = Input | ImageFiles | ImageNetFile
"""One input file: the unit that an interrupted preparation resumes with."""


@dataclass(frozen=True)
class Source:
    """What a corpus is prepared from."""

    dataset: str
    inputs: list[Readable]
    tokenizer: Tokenizer | None
    """None if it is learned."""
    vocab_size: int
    ends_documents: bool = False
    shares: tuple[float, float] = (0.05, 0.05)
    """Of validation and test, for inputs without a split."""
    has_images: bool = False

    @property
    def splits(self) -> list[str]:
        """The splits that must not be empty."""
        given = {item.split for item in self.inputs}
        shares = dict(zip(SPLITS, (1.0, *self.shares), strict=True))
        return [name for name in SPLITS if name in given or (None in given and shares[name] > 0)]

    def fingerprint(self) -> list[object]:
        """Return JSON values that change whenever the tokens may change."""
        files = [item.files() for item in self.inputs]
        parents = {os.path.dirname(os.path.abspath(file)) for some in files for file in some}
        root = os.path.commonpath(parents) if parents else "/"
        inputs = []
        for item, some in zip(self.inputs, files, strict=True):
            options = {name: x for name, x in vars(item).items() if name not in ("path", "images")}
            with reading(item.path):
                status = [(file, file.stat()) for file in some]
            found = [[os.path.relpath(x, root), y.st_size, y.st_mtime_ns] for x, y in status]
            inputs.append([options, found or item.path])
        tokenizer: list[object] = ["bpe"]
        if self.tokenizer is not None:
            tokenizer = [self.tokenizer.sha256, self.tokenizer.bos, self.tokenizer.eod]
        return [self.dataset, self.vocab_size, inputs, tokenizer, self.shares]


def find_source(config: DataConfig, vocab_size: int | None) -> Source:
    """Return what a config names.

    vocab_size: of a vocabulary that must be learned; None uses 8,192.
    """
    name, ends, shares = config.dataset, config.ends_documents, (0.05, 0.05)
    path = Path(os.path.expanduser(config.path[0])) if config.path else None
    if path is None and name not in ("text", "enwik8"):
        raise DataError(f"{name} is not downloaded automatically; give its folder as --data.path")
    if config.has_images:
        assert path is not None
        images = find_imagenet64(path) if name == "imagenet64" else find_images(path)
        return Source(name, list(images), ByteTokenizer(), 256, shares=shares, has_images=True)
    if name == "text":
        inputs, shares = _text_inputs(config)
    elif name == "enwik8":
        inputs = [_find_enwik8(path, Path(os.path.expanduser(config.cache_folder)))]
    else:
        assert path is not None
        inputs = _books(path)
    if config.tokenizer is None and name == "pg19":
        fix = "give a SentencePiece .model file as --data.tokenizer, or use --data.tokenizer bpe"
        raise DataError(f"pg19 needs a vocabulary; {fix}")
    kind, tokenizer = config.tokenizer_name, None
    if kind not in LEARNED:
        file = Path(os.path.expanduser(kind))
        tokenizer = ByteTokenizer(ends) if kind == "bytes" else open_tokenizer(file, ends)
    size = vocab_size or DEFAULT_VOCAB_SIZE if tokenizer is None else tokenizer.vocab_size
    return Source(name, list(inputs), tokenizer, size, ends, shares)


def _text_inputs(config: DataConfig) -> tuple[list[Input], tuple[float, float]]:
    """Return the files of all splits, and the shares of validation and test.

    A share is 0 if a split has files of its own.
    """
    if config.path:
        inputs = find_inputs(config.path, config.format, text_field=config.text_field)
    else:
        inputs = python_sources()
    for split in SPLITS[1:]:
        if paths := getattr(config, f"{split}_path"):
            option = f"--data.{split}-path"
            inputs += find_inputs(paths, config.format, split, option, config.text_field)
    given = {item.split for item in inputs}
    validation = 0.0 if "validation" in given else config.validation_share
    return inputs, (validation, 0.0 if "test" in given else config.test_share)


def _books(root: Path) -> list[Input]:
    """Return the books in the folder structure of PG-19: <split>/<id>.txt."""
    fix = "--data.path must contain the books as train/, validation/ and test/<id>.txt"
    check_folder(root, fix)
    books: list[Input] = []
    for split in SPLITS:
        check_folder(root / split, fix)
        found = list_files(root / split, lambda name: name.endswith(".txt"))
        if not found:
            raise DataError(f"{root / split} contains no books; {fix}")
        books += [Input(str(file), "text", split, unix_newlines=True) for file in found]
    return books


def _find_enwik8(path: Path | None, cache: Path) -> Input:
    fix = "run `tvq prepare enwik8` or give a file as --data.path"
    if path is None and not (cache / DOWNLOAD).is_file():
        raise DataError(f"enwik8 is not downloaded; {fix}")
    path = path or cache / DOWNLOAD
    if path_kind(path, fix) == "file":
        return Input(str(path), "text")
    for name in ("enwik8", "enwik8.zip"):
        if (path / name).is_file():
            return Input(str(path / name), "text")
    raise DataError(f"{path} contains neither enwik8 nor enwik8.zip; {fix}")


def download(cache: Path, url: str = URL, sha256: str = ZIP_SHA256) -> Path:
    """Download enwik8.zip to the cache and return its path; raise DataError if that fails.

    Does nothing if an intact copy exists.
    """
    from torch.hub import download_url_to_file

    target = cache / DOWNLOAD
    try:
        if target.is_file() and file_digest(target) == sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        info(f"downloading {url}")
        download_url_to_file(url, str(target), hash_prefix=sha256, progress=False)
    except (OSError, URLError, RuntimeError, CorruptFileError) as error:
        fix = "run the command again, or give a local file as --data.path"
        raise DataError(f"cannot download {url}: {error_reason(error)}; {fix}") from error
    return target
