"""Prepared corpora: open one and read its splits; tokens are memory-mapped.

A corpus is a folder with `meta.json`, `tokens.bin`, one index per split, and its vocabulary.
`tokens.bin` holds the tokens of all documents in the order in which they were read. `<split>.npy`,
[2, m] of int64, holds the documents of a split in their order: where each one starts in the split,
and where it starts in `tokens.bin`. `manifest.json` holds the digests of all files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_vq.data.paths import DataError, error_reason
from transformer_vq.data.tokenizers import Tokenizer, load_tokenizer
from transformer_vq.files import CorruptFileError, check_large_files, read_object

META = "meta.json"
TOKENS = "tokens.bin"
FORMAT = 7  # increased whenever the same data would give different files
FIX = "delete it and prepare it again"


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest unsigned integer type for all tokens of a vocabulary."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class SplitSize:
    """The size of a split; bytes and words are counted in the original data."""

    tokens: int
    documents: int
    bytes: int
    words: int | None
    """None if the data is not text."""


@dataclass(frozen=True)
class Split:
    """The tokens of a training, validation or test split.

    `len(split)` is the number of tokens, `split[first:last]` reads some of them. Arrays are
    memory-mapped, so a split may be larger than memory.
    """

    stored: np.ndarray
    """The tokens of all documents of the corpus, of an unsigned integer type."""
    starts: np.ndarray
    """Index of the first token of each document, [m] of int64 in ascending order, starting at 0."""
    bos: int
    """The input token for the first target of a document."""
    size: SplitSize
    offsets: np.ndarray | None = None
    """Where each document starts in `stored`, [m]; None if `stored` has the order of the split."""

    def __len__(self) -> int:
        return self.size.tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        """Return consecutive tokens of the split."""
        at = np.arange(*index.indices(len(self)))
        return self.read(at, np.searchsorted(self.starts, at, side="right") - 1)

    def read(self, at: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Return the tokens at any positions. document: the number of their documents."""
        if self.offsets is not None:
            at = at - self.starts[document] + self.offsets[document]
        tokens: np.ndarray = self.stored[at]
        return tokens

    @property
    def tokens(self) -> np.ndarray:
        """All tokens of the split in order, loaded into memory."""
        return self[:]


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: a folder with the tokens of the splits train, validation and test.

    `prepare` creates one from data, `Corpus.open` opens an existing folder. Tokens are not read
    until a split is used.
    """

    folder: Path
    dataset: str
    """Name of the dataset, as in `DataConfig.dataset`."""
    vocab_size: int
    bos: int
    """The input token for the first target of a document."""
    sha256: str
    """Identifies the documents of all splits and how they were tokenized."""
    sizes: dict[str, SplitSize]
    """The size of each split by name."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the vocabulary file; None if tokens are bytes."""
    end_of_document: bool = False
    """Whether a token follows each document."""

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Open a prepared corpus; files that changed since the last time are verified.

        Raises CorruptFileError if a file is missing, corrupt or was changed.
        """
        try:
            meta = read_object(folder / META)
        except CorruptFileError as error:
            raise CorruptFileError(f"{error}; {FIX}") from error
        if meta.pop("format", None) != FORMAT:
            raise CorruptFileError(f"{folder} was written by another version; {FIX}")
        check_large_files(folder, FIX)
        sizes = {name: SplitSize(**size) for name, size in meta.pop("splits").items()}
        return cls(folder, sizes=sizes, **meta)

    def split(self, name: str) -> Split:
        """Return the split "train", "validation" or "test".

        Raises DataError for other names, and CorruptFileError if files were changed since `open`.
        """
        if name not in self.sizes:
            fix = "set --data.validation-share or --data.test-share"
            raise DataError(f"there is no {name} split, only {', '.join(self.sizes)}; {fix}")
        try:
            stored = np.memmap(self.folder / TOKENS, token_dtype(self.vocab_size), mode="r")
            starts, offsets = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        except Exception as error:  # numpy raises many kinds of errors for corrupt headers
            problem = f"{self.folder} was changed ({error_reason(error)})"
            raise CorruptFileError(f"{problem}; {FIX}") from error
        return Split(stored, starts, self.bos, self.sizes[name], offsets)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the corpus, which converts text to tokens and back."""
        return load_tokenizer(self.folder, self.tokenizer_sha256, self.end_of_document)
