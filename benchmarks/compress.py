"""Bits per byte of trained models, n-gram models and compressors on exactly the same text.

- Runs are evaluated one file at a time, with both protocols of `evaluate`.
- N-gram models are static: counted on the training files and not adapted to the measured file.
- Compressors are adaptive and start empty. A primed compressor has compressed the training files
  first: its size is that of training files and file in one stream, minus that of the training files
  alone.

Runs and n-gram models also predict the end of each document, which counts as zero bytes.
"""

from __future__ import annotations

import bz2
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import tyro

from common import Device, Output, Record, main
from measure import machine
from ngram import N, bits_by_order
from transformer_vq.config import DataConfig, Precision
from transformer_vq.device import find_device
from transformer_vq.errors import MissingExtraError, UserError, missing_extra
from transformer_vq.plots import BLUE, GREEN, LINE, MUTED, ORANGE, new_figure
from transformer_vq.progress import Advance, info, progress_bar, warn
from transformer_vq.training.evaluate import evaluate

Training = Literal["none", "weights", "counts", "primed"]
"""How a model uses training text.

weights: a trained run, which may have been trained on other text. counts: an n-gram model of the
training files. primed: a compressor that has compressed the training files first.
"""


CHUNK = 1 << 18  # bytes that are compressed between two updates of the progress bar


XZ_DICTIONARY = 64 << 20  # bytes, as in `xz -9`


XZ_LARGEST_DICTIONARY = 1536 << 20  # of liblzma


PPMD_MEMORY = 64  # bytes of memory per byte of text; order 16 needs about half of it


PPMD_SMALLEST, PPMD_LARGEST = 16 << 20, 1 << 31  # bytes of memory; a full model starts again


END = np.array([N - 1], dtype=np.uint16)  # the end of a document


@dataclass(frozen=True)
class Text:
    """A text file, which is one document."""

    path: Path
    data: bytes

    @property
    def tokens(self) -> np.ndarray:
        """Bytes as tokens, followed by the end of the document."""
        return np.concatenate([np.frombuffer(self.data, dtype=np.uint8), END], dtype=np.uint16)


class Stream(Protocol):
    """A compressor of the standard library, or one with the same interface."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


@dataclass(frozen=True)
class Compressor:
    """A way to compress text."""

    name: str
    start: Callable[[int], Stream]
    """Returns a stream for this many bytes."""
    can_prime: bool = True
    """Whether text that was compressed before affects the text that follows."""


def measure(options: Options) -> Record:
    """Measure runs, n-gram models and compressors on the files of the options."""
    if not options.data.path:
        raise UserError("no text to measure; give files as --data.path")
    texts = read_texts(options.data.path, "--data.path")
    train = read_texts(options.train_path, "--train-path")
    if {text.path for text in texts} & {text.path for text in train}:
        raise UserError("a measured file is also a training file; remove it from --train-path")
    rows: list[Record] = []
    for run in dict.fromkeys(options.runs):
        info(f"evaluating {run.name}")
        for protocol, bits in _run_bits(run, texts, options).items():
            rows.append(_row(f"{run.name}, {protocol}", "weights", bits, texts))
    if train:
        rows += _ngram_rows(texts, train, options.orders)
    else:
        info("no --train-path: n-gram models and primed compressors are skipped")
    rows += _compressor_rows(texts, train, compressors(options.ppmd_orders))
    return {
        "files": [{"name": text.path.name, "bytes": len(text.data)} for text in texts],
        "train_bytes": sum(len(text.data) for text in train),
        "compression": rows,
        "machine": machine(),
    }


def table(record: Record) -> str:
    """Return a Markdown table: a row per model, a column per file and one for all files."""
    sizes = [file["bytes"] for file in record["files"]]
    lines = [
        f"bits per byte; training files: {record['train_bytes']:,} bytes",
        "",
        _line("model", "training text", *(file["name"] for file in record["files"]), "total"),
        _line("---", "---", *["---:"] * (len(sizes) + 1)),
        _line("bytes", "", *(f"{n:,}" for n in [*sizes, sum(sizes)])),
    ]
    for row in record["compression"]:
        bits = [bits / n for bits, n in zip(row["bits"], sizes, strict=True)]
        values = [f"{x:.4f}" for x in [*bits, row["bits_per_byte"]]]
        lines.append(_line(row["name"], row["training"], *values))
    return "\n".join(lines)


def read_texts(names: Sequence[str], option: str) -> list[Text]:
    """Read text files and folders of them. option: the option that gave the names."""
    paths: list[Path] = []
    for path in map(Path, names):
        paths += sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    texts = [Text(path.resolve(), path.read_bytes()) for path in paths]
    if empty := [text.path for text in texts if not text.data]:
        raise UserError(f"{empty[0]} is empty; remove it from {option}")
    return texts


def compressors(ppmd_orders: Sequence[int] = ()) -> list[Compressor]:
    """Return all compressors; those of packages that are not installed cause a warning."""
    found = [
        Compressor("bzip2 -9", lambda n: bz2.BZ2Compressor(9), can_prime=False),  # 900 kB blocks
        Compressor("xz -9e", xz),
    ]
    try:
        return found + [Compressor(f"PPMd, order {order}", ppmd(order)) for order in ppmd_orders]
    except MissingExtraError as error:
        warn(f"PPMd is skipped: {error}")
        return found


def xz(n_bytes: int) -> Stream:
    """Return `xz -9e` for this many bytes, with a dictionary that covers all of them."""
    size = min(max(n_bytes, XZ_DICTIONARY), XZ_LARGEST_DICTIONARY)
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": size}]
    return lzma.LZMACompressor(lzma.FORMAT_XZ, filters=filters)


def ppmd(order: int) -> Callable[[int], Stream]:
    """Return PPMd variant I (that of zip files) of this order, with enough memory for the text."""
    try:
        import pyppmd
    except ImportError:
        raise missing_extra("PPMd", "pyppmd") from None

    def start(n_bytes: int) -> Stream:
        memory = min(max(PPMD_MEMORY * n_bytes, PPMD_SMALLEST), PPMD_LARGEST)
        stream: Stream = pyppmd.PpmdCompressor(order, memory, variant="I")
        return stream

    return start


def _run_bits(run: Path, texts: Sequence[Text], options: Options) -> dict[str, list[float]]:
    """Return the bits of each file by protocol."""
    found: dict[str, list[float]] = {}
    for text in texts:
        result = evaluate(
            run,
            data=DataConfig(path=(str(text.path),), cache=options.data.cache),
            split="all",
            checkpoint=options.checkpoint,
            precision=options.precision,
            device=find_device(options.device),
        )
        for protocol, evaluation in result.protocols.items():
            found.setdefault(protocol, []).append(evaluation.nats / math.log(2))
    return found


def _ngram_rows(
    texts: Sequence[Text], train: Sequence[Text], orders: Sequence[int]
) -> list[Record]:
    rows = []
    n_orders = max(orders, default=-1) + 1
    counted = np.concatenate([text.tokens for text in train])
    bits_of_orders = bits_by_order(counted, [text.tokens for text in texts])
    with progress_bar("n-grams", n_orders, "orders") as advance:
        for order, bits in enumerate(islice(bits_of_orders, n_orders)):
            advance(1)
            if order in orders:
                rows.append(_row(f"n-grams, order {order}", "counts", bits, texts))
    return rows


def _compressor_rows(
    texts: Sequence[Text], train: Sequence[Text], compressors: Sequence[Compressor]
) -> list[Record]:
    """Return the rows of all compressors: first without, then with training files."""
    files = [text.data for text in texts]
    before = b"".join(text.data for text in train)
    n_bytes = sum(map(len, files))
    n_primed = n_bytes + len(before) * (len(files) + 1) if train else 0
    total = sum(n_bytes + n_primed * compressor.can_prime for compressor in compressors)
    rows = []
    with progress_bar("compressing", total, "B") as advance:
        for compressor in compressors:

            def bits(data: bytes, compressor: Compressor = compressor) -> float:
                return 8.0 * compressed_size(compressor, data, advance)

            alone = [bits(file) for file in files]
            rows.append(_row(compressor.name, "none", alone, texts))
            if train and compressor.can_prime:
                base = bits(before)
                primed = [bits(before + file) - base for file in files]
                rows.append(_row(compressor.name, "primed", primed, texts))
    return rows


def compressed_size(
    compressor: Compressor, data: bytes, advance: Advance = lambda n, note="": None
) -> int:
    """Return the number of bytes of the compressed data."""
    stream, size = compressor.start(len(data)), 0
    for first in range(0, len(data), CHUNK):
        chunk = data[first : first + CHUNK]
        size += len(stream.compress(chunk))
        advance(len(chunk), compressor.name)
    return size + len(stream.flush())


def _row(name: str, training: Training, bits: Sequence[float], texts: Sequence[Text]) -> Record:
    total = sum(bits) / sum(len(text.data) for text in texts)
    return {"name": name, "training": training, "bits": list(bits), "bits_per_byte": total}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def row_name(row: Record) -> str:
    """Return the name of a row in figures, which also says whether a compressor was primed."""
    return f"{row['name']}, primed" if row["training"] == "primed" else row["name"]


COLORS: dict[Training, tuple[str, str]] = {
    "weights": ("trained model", BLUE),
    "counts": ("counts of the training files", GREEN),
    "primed": ("after the training files", ORANGE),
    "none": ("without training files", LINE),
}
"""Name and color by use of training text, in the order of the legend."""


def plot_compression(record: Record, path: Path) -> None:
    """Plot the bits per byte over all files, the lowest first."""
    rows = sorted(record["compression"], key=lambda row: row["bits_per_byte"])
    values = [row["bits_per_byte"] for row in rows]
    with new_figure(path, height=2.0 + 0.27 * len(rows)) as (figure, (axes,)):
        for training, (label, color) in COLORS.items():
            places = [i for i, row in enumerate(rows) if row["training"] == training]
            if places:
                axes.barh(places, [values[i] for i in places], 0.7, color=color, label=label)
        for bars in axes.containers:
            axes.bar_label(bars, fmt="%.3f", padding=4, color=MUTED)
        axes.set_yticks(range(len(rows)), [row_name(row) for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.1, y=0.02)
        axes.set_title("Bits per byte, lower is better")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside lower center", ncols=2)
        n_bytes = sum(file["bytes"] for file in record["files"])
        sizes = f"measured text: {n_bytes / 1e6:,.1f} MB"
        if record["train_bytes"]:
            sizes += f", training files: {record['train_bytes'] / 1e6:,.1f} MB"
        axes.set_xlabel(sizes)


Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")]


@dataclass(frozen=True)
class Texts:
    """Text to measure."""

    path: tuple[str, ...] = ()
    """Text files, or folders of *.txt files; each file is measured by itself."""
    cache: str | None = None
    """Folder for the prepared text of runs. None uses $XDG_CACHE_HOME/transformer_vq, by default
    ~/.cache/transformer_vq."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Compare runs with n-gram models and compressors: bits per byte of the same files.

    N-gram models are counted on the training files and do not adapt to the measured file.
    Compressors are measured on each file alone, and primed: after the training files, in the same
    stream.
    """

    runs: Runs = ()
    """Run folders or packaged models to evaluate; without any, only the baselines are measured."""
    data: Texts = Texts()
    """Text to measure."""
    train_path: tuple[str, ...] = ()
    """Training files or folders. If omitted, n-gram models and primed compressors are
    skipped."""
    orders: tuple[int, ...] = (0, 2, 4)
    """Orders of the n-gram models: how many preceding bytes they use."""
    ppmd_orders: tuple[int, ...] = (6, 8)
    """Orders of PPMd, which needs the extra `compress`."""
    checkpoint: str = "best"
    """best, last, or the number of a step."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products of the runs."""
    device: Device = "auto"


if __name__ == "__main__":
    main(Options, measure, table, plot_compression)
