"""Text: documents from files of any text format, or the sources of Python itself."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np

from transformer_vq.config.data import LearnedTokenizer
from transformer_vq.data.corpus_writer import token_dtype
from transformer_vq.data.scan import Plan, Scan, plan_splits, scan_documents
from transformer_vq.data.segments import (
    LINE_STARTS,
    Fragment,
    cut_documents,
    segments,
    unix_newlines,
)
from transformer_vq.data.shards import (
    Encoded,
    RoundTrip,
    Shards,
    ShardWriter,
    encode_bytes,
    encode_segments,
)
from transformer_vq.data.sources.base import SPLITS, Chunk, DataError
from transformer_vq.data.sources.inputs import Input
from transformer_vq.data.sources.paths import file_fingerprint
from transformer_vq.data.sources.readers import Piece, ReadCounts, read_pieces
from transformer_vq.data.tokenizer_training import LEARNED_BOS, learn_tokenizer
from transformer_vq.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from transformer_vq.files import atomic_folder
from transformer_vq.progress import progress_bar, warn


@dataclass(frozen=True)
class Group:
    """Files that are treated alike."""

    inputs: tuple[Input, ...]
    split: str | None = None
    """The split they belong to; None divides them by share."""
    part: int = 0
    """Index of the weight with which they are sampled."""


@dataclass
class TextSource:
    """Documents as tokens, ordered by a digest of their content."""

    groups: Sequence[Group]
    vocab_size: int
    tokenizer: Tokenizer | None
    """None if it is learned in `setup`."""
    learned: LearnedTokenizer = "bpe"
    """Tokenizer to learn if none is given."""
    ends_documents: bool = False
    text_field: str | None = None
    shares: tuple[float, float] = (0.05, 0.05)
    """Of validation and test, for groups without a split."""
    edges: tuple[int, int] | None = None
    """Where validation and test start, in bytes, instead of shares."""
    replace_crlf: bool = False
    """Read CRLF as LF."""
    has_words: bool = True
    n_bytes: int = 0
    """Bytes of all documents; known after `setup`."""
    _eod: int | None = field(default=None, repr=False)
    _plan: Plan | None = field(default=None, repr=False)
    _shards: Shards | None = field(default=None, repr=False)

    @property
    def bos(self) -> int:
        return LEARNED_BOS[self.learned] if self.tokenizer is None else self.tokenizer.bos

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that contain documents."""
        given = {group.split for group in self.groups}
        shares = dict(zip(SPLITS[1:], self.shares, strict=True))
        by_share = {name for name in SPLITS if shares.get(name, 1.0) > 0} if None in given else {}
        return tuple(name for name in SPLITS if name in given or name in by_share)

    def fingerprint(self) -> list[object]:
        parents = [str(file.path.absolute().parent) for g in self.groups for file in g.inputs]
        root = Path(os.path.commonpath(parents))
        files: list[object] = []
        for group in self.groups:
            for file in group.inputs:
                about = file_fingerprint(file.path.absolute(), root)
                files.append([group.split, group.part, file.format, file.member, *about])
        tokenizer: list[object] = [self.learned]
        if self.tokenizer is not None:
            tokenizer = [self.tokenizer.sha256, self.tokenizer.bos, self.tokenizer.eod]
        settings = [self.text_field, self.shares, self.edges, self.replace_crlf]
        return [files, tokenizer, self.ends_documents, *settings]

    def setup(self, folder: Path, work: Path) -> None:
        """Read and tokenize all documents; resume what an interrupted preparation has left."""
        scan = self._scan(work / "scan.npz")
        self.n_bytes = int(scan.sizes.sum())
        self._plan = plan_splits(scan, self.shares, self.edges)
        tokenizer = self.tokenizer or self._learn(self._plan, work)
        tokenizer.save(folder)
        self._eod = tokenizer.eod
        self._shards = self._tokenize(self._plan, tokenizer, work)
        if self._shards.n_bytes != self.n_bytes:
            raise DataError("the files changed while they were read; run the command again")

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the documents of a split, ordered by content."""
        assert self._plan is not None, "call setup() first"
        assert self._shards is not None
        end = [] if self._eod is None else [self._eod]
        eod = np.array(end, dtype=token_dtype(self.vocab_size))
        for fragment in self._plan.fragments(split).tolist():
            part = int(self._plan.parts[fragment])
            starts = True
            for item in self._shards.read(fragment):
                yield Chunk(item.tokens, starts, item.n_bytes, item.n_words, part)
                starts = False
            if len(eod) and self._plan.ends[fragment] and not starts:
                yield Chunk(eod, False, 0, 0, part)

    def _pieces(self, group: Group, counts: ReadCounts | None = None) -> Iterator[Piece]:
        pieces = read_pieces(group.inputs, self.text_field, counts)
        return unix_newlines(pieces) if self.replace_crlf else pieces

    def _fragments(self, plan: Plan) -> Iterator[Fragment]:
        pieces = chain.from_iterable(map(self._pieces, self.groups))
        return cut_documents(pieces, plan.cuts, not isinstance(self.tokenizer, ByteTokenizer))

    def _scan(self, path: Path) -> Scan:
        """Measure all documents. path: stores the result for a resumed preparation."""
        if path.is_file():
            return Scan.load(path)
        counts, scans = ReadCounts(), []
        with progress_bar("reading", None, "B") as advance:
            for group in self.groups:
                pieces = self._pieces(group, counts)
                scans.append(scan_documents(pieces, group.split, group.part, advance))
        for group, found in zip(self.groups, scans, strict=True):
            if not len(found.sizes):
                raise DataError(_no_text(group))
        if counts.empty:
            warn(f"{counts.empty:,} of {counts.documents:,} documents are empty and were skipped")
        scan = Scan.concatenate(scans)
        scan.save(path)
        return scan

    def _learn(self, plan: Plan, work: Path) -> Tokenizer:
        """Learn the vocabulary from the training documents, unless that is already done."""
        folder = work / "tokenizer"
        if not folder.is_dir():
            is_train = plan.splits == SPLITS.index("train")
            fragments = (x for x in self._fragments(plan) if is_train[x.number])
            texts = (segment.text for segment in segments(fragments, LINE_STARTS))
            with atomic_folder(folder) as partial:
                learn_tokenizer(self.learned, texts, self.vocab_size, partial, self.n_bytes)
        return load_tokenizer(folder, end_of_document=self.ends_documents)

    def _tokenize(self, plan: Plan, tokenizer: Tokenizer, work: Path) -> Shards:
        writer = ShardWriter(work, token_dtype(self.vocab_size))
        fragments, round_trip = self._fragments(plan), RoundTrip()
        items: Iterator[Encoded]
        if isinstance(tokenizer, ByteTokenizer):
            # Skipped after encoding, because words may span the place where it was interrupted.
            items = islice(encode_bytes(fragments), writer.n_done, None)
        else:
            found = islice(segments(fragments, tokenizer.cuts), writer.n_done, None)
            items = encode_segments(found, tokenizer, round_trip)
        with progress_bar("tokenizing", self.n_bytes, "B", writer.bytes_done) as advance:
            shards = writer.write(items, advance)
        if round_trip.lossy:
            share = round_trip.lossy / round_trip.checked
            warn(
                f"the tokenizer changes the text: {share:.1%} of the checked segments differ after "
                "decoding; bits per byte still refer to the original bytes"
            )
        return shards


def _no_text(group: Group) -> str:
    first = group.inputs[0].name
    if len(group.inputs) == 1:
        return f"{first} is empty; give another file"
    return f"all {len(group.inputs):,} files are empty, for example {first}; give other files"


def python_sources() -> list[Path]:
    """Return the source files of Python's standard library, without tests and empty files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = [f for f in root.rglob("*.py") if not excluded & set(f.relative_to(root).parts)]
    return sorted(file for file in found if file.stat().st_size > 0)
