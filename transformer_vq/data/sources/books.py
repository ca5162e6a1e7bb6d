"""Books in the folder structure of PG-19: train/, validation/ and test/ with one file per book."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import SPLITS, Chunk, DataError
from transformer_vq.data.sources.paths import (
    check_folder,
    error_reason,
    file_fingerprint,
    list_files,
)
from transformer_vq.data.sources.text import count_words
from transformer_vq.data.tokenizer_training import LEARNED_BOS, train_sentencepiece
from transformer_vq.data.tokenizers import MODEL_FILE, SentencePieceTokenizer
from transformer_vq.progress import progress_bar

N_THREADS = min(os.cpu_count() or 1, 16)
_FIX = "--data.path must contain the books as train/, validation/ and test/<id>.txt"


@dataclass
class Books:
    """Books as SentencePiece tokens, one document per book.

    CRLF is read as LF, so copies with either line ending give the same tokens and bytes. Words of
    the original text are separated by ASCII white space.
    """

    root: Path
    files: dict[str, list[Path]]
    vocab_size: int
    bos: int
    n_bytes: int
    """Total size of the files on disk."""
    tokenizer: SentencePieceTokenizer | None
    """None until `setup` has trained it."""
    vocabulary: str
    """SHA-256 of the given vocabulary, or "learned" if it is trained on the train split."""
    has_words: bool = True

    @classmethod
    def from_folder(cls, root: Path, vocab_size: int, tokenizer: Path | None = None) -> Books:
        """List the books of all splits.

        tokenizer: a SentencePiece .model file; None trains one with `vocab_size` pieces.
        """
        check_folder(root, _FIX)
        files = {split: _list_books(root / split) for split in SPLITS}
        n_bytes = sum(_total_size(files[split]) for split in SPLITS)
        if tokenizer is None:
            return cls(root, files, vocab_size, LEARNED_BOS, n_bytes, None, "learned")
        given = SentencePieceTokenizer(tokenizer)
        return cls(root, files, given.vocab_size, given.bos, n_bytes, given, given.sha256)

    def fingerprint(self) -> list[object]:
        files = [file for split in SPLITS for file in self.files[split]]
        return [[file_fingerprint(file, self.root) for file in files], self.vocabulary]

    def setup(self, folder: Path) -> None:
        """Write the given vocabulary to the folder, or train one there."""
        if self.tokenizer is None:
            path, n_chars = folder / MODEL_FILE, _total_size(self.files["train"])
            train_sentencepiece(self._texts(n_chars), self.vocab_size, path, n_chars)
            self.tokenizer = SentencePieceTokenizer(path)
        else:
            self.tokenizer.save(folder)

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield one chunk per book, ordered by name; books without tokens are skipped."""
        for chunk in _map_in_order(self._encode, self.files[split], N_THREADS):
            if len(chunk.tokens) > 0:
                yield chunk

    def _texts(self, n_bytes: int) -> Iterator[str]:
        with progress_bar("reading books", n_bytes, "B") as advance:
            for file in self.files["train"]:
                original = _read(file)
                yield _text(file, original)
                advance(len(original))

    def _encode(self, file: Path) -> Chunk:
        assert self.tokenizer is not None, "call setup() before chunks()"
        original = _read(file)
        text = _text(file, original)
        tokens = np.array(self.tokenizer.encode(text), dtype=np.uint32)
        n_words, _ = count_words(original)
        return Chunk(tokens, True, len(text.encode()), n_words)


def _list_books(folder: Path) -> list[Path]:
    """Return the .txt files of a split, without hidden and empty ones."""
    check_folder(folder, _FIX)
    found = list_files(folder, recursive=False, wanted=lambda name: name.endswith(".txt"))
    books = sorted(f for f in found if _total_size([f]) > 0)
    if not books:
        raise DataError(f"{folder} contains no books; {_FIX}")
    return books


def _total_size(files: list[Path]) -> int:
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error_reason(error)}") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error_reason(error)}") from error


def _text(file: Path, original: bytes) -> str:
    """Return the text of a book with CRLF replaced by LF; a single CR is kept."""
    try:
        return original.replace(b"\r\n", b"\n").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason}); convert or remove it") from error


def _map_in_order(
    encode: Callable[[Path], Chunk], files: list[Path], n_threads: int
) -> Iterator[Chunk]:
    """Yield the encoded books in order, while threads encode the next few.

    Threads are sufficient: SentencePiece releases the GIL while it encodes.
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
