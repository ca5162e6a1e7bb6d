"""Books in PG-19's layout: folders train, validation and test that hold a text file per book."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import (
    SPLITS,
    Chunk,
    DataError,
    check_folder,
    files_in,
    reason,
    stat_of,
)
from transformer_vq.data.sources.text import count_words
from transformer_vq.data.tokenizers import (
    LEARNED_BOS,
    MODEL_FILE,
    SentencePieceTokenizer,
    train_sentencepiece,
)
from transformer_vq.progress import progress_bar

N_THREADS = min(os.cpu_count() or 1, 16)
LAYOUT = "books must be stored in train/, validation/ and test/ as <id>.txt"


@dataclass
class Books:
    """Books as pieces of a SentencePiece vocabulary, a document each.

    Lines end with LF, so that copies with CRLF give the same tokens; bytes are counted after that.
    Words are those of the original text, between ASCII white space.
    """

    root: Path
    files: dict[str, list[Path]]
    vocab_size: int
    bos: int
    n_bytes: int
    """As the files lie on disk."""
    tokenizer: SentencePieceTokenizer | None
    """None until `setup` has learned it."""
    vocabulary: str
    """Where the vocabulary comes from: its hash, or that it is learned from the train split."""
    has_words: bool = True

    @classmethod
    def of(cls, root: Path, vocab_size: int, tokenizer: Path | None = None) -> Books:
        """vocab_size: of the vocabulary to learn; unused if there is a .model to encode with."""
        check_folder(root, f"in --data.path {LAYOUT}")
        files = {split: _books_of(root / split) for split in SPLITS}
        n_bytes = sum(_size_of(files[split]) for split in SPLITS)
        if tokenizer is None:
            return cls(root, files, vocab_size, LEARNED_BOS, n_bytes, None, "learned")
        given = SentencePieceTokenizer(tokenizer)
        return cls(root, files, given.vocab_size, given.bos, n_bytes, given, given.sha256)

    def fingerprint(self) -> list[object]:
        stats = [stat_of(file, self.root) for split in SPLITS for file in self.files[split]]
        return [stats, self.vocabulary]

    def setup(self, folder: Path) -> None:
        """Put the vocabulary into the folder: the one that was given, or a learned one."""
        if self.tokenizer is None:
            path, n_chars = folder / MODEL_FILE, _size_of(self.files["train"])
            train_sentencepiece(self._texts(n_chars), self.vocab_size, path, n_chars)
            self.tokenizer = SentencePieceTokenizer(path)
        else:
            self.tokenizer.save(folder)

    def chunks(self, split: str) -> Iterator[Chunk]:
        """A book each, in the order of their names; books without tokens are left out."""
        for piece in _in_order(self._encode, self.files[split], N_THREADS):
            if len(piece.tokens) > 0:
                yield piece

    def _texts(self, n_bytes: int) -> Iterator[str]:
        with progress_bar("reading books", n_bytes, "B") as advance:
            for file in self.files["train"]:
                original = _read(file)
                yield _text(file, original)
                advance(len(original))

    def _encode(self, file: Path) -> Chunk:
        assert self.tokenizer is not None, "setup comes first"
        original = _read(file)
        text = _text(file, original)
        tokens = np.array(self.tokenizer.encode(text), dtype=np.uint32)
        n_words, _ = count_words(original)
        return Chunk(tokens, True, len(text.encode()), n_words)


def _books_of(folder: Path) -> list[Path]:
    """Files that are hidden or empty are no books."""
    check_folder(folder, f"in --data.path {LAYOUT}")
    found = files_in(folder, recursive=False, wanted=lambda name: name.endswith(".txt"))
    books = sorted(f for f in found if _size_of([f]) > 0)
    if not books:
        raise DataError(f"there are no books in {folder}; in --data.path {LAYOUT}")
    return books


def _size_of(files: list[Path]) -> int:
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {reason(error)}") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {reason(error)}") from error


def _text(file: Path, original: bytes) -> str:
    """The text of a book, its lines ending with LF; a CR by itself stays."""
    try:
        return original.replace(b"\r\n", b"\n").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason}); convert or remove it") from error


def _in_order(
    encode: Callable[[Path], Chunk], files: list[Path], n_threads: int
) -> Iterator[Chunk]:
    """The books one after the other, while the next few are encoded.

    Threads are enough: SentencePiece leaves the interpreter to others while it works.
    """
    if n_threads == 1 or len(files) == 1:
        yield from map(encode, files)
        return
    pool = ThreadPoolExecutor(n_threads)
    waiting: deque[Future[Chunk]] = deque()
    try:
        for file in files:
            waiting.append(pool.submit(encode, file))
            if len(waiting) > 2 * n_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
