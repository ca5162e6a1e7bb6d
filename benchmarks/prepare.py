"""Preparation of text: throughput next to that of the tokenizer library alone, and peak memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Literal

from common import Output, Record, check_positive, main
from measure import machine
from transformer_vq.config import DataConfig
from transformer_vq.data.bpe import LINE_STARTS
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.prepare import prepare
from transformer_vq.data.tokenizers import CHUNK_CHARS, TOKENIZER_FILES, divide
from transformer_vq.errors import UserError, import_extra
from transformer_vq.progress import info

LIBRARY_BYTES = 20_000_000  # of text that the library tokenizes alone, from memory


# Prepares a corpus in a process of its own; prints its peak memory and the time. getrusage would
# include the memory of the parent, so it is used only where /proc does not exist.
_PREPARE = """
import json, re, resource, sys, time
from transformer_vq.config import DataConfig
from transformer_vq.checks import from_plain
from transformer_vq.data import prepare as preparing
config = from_plain(DataConfig, json.loads(sys.argv[1]), "data")
learning = 0.0
learn = preparing._learn
def timed(*arguments):
    global learning
    start = time.perf_counter()
    tokenizer = learn(*arguments)
    learning = time.perf_counter() - start
    return tokenizer
preparing._learn = timed
start = time.perf_counter()
preparing.prepare(config, json.loads(sys.argv[2]))
seconds = time.perf_counter() - start - learning
try:
    kib = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
except OSError:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
kib = max(kib, children / (1024 if sys.platform == "darwin" else 1))  # learning is a subprocess
print(json.dumps({"seconds": seconds, "learning": learning, "peak_mb": kib * 1024 / 1e6}))
"""


def run(config: DataConfig, vocab_size: int, megabytes: tuple[int, ...]) -> Record:
    """Learn a vocabulary from the text, then prepare copies of the text of several sizes.

    config: text and the tokenizer to learn; the time of learning is reported separately. The
    throughput of the library alone is measured before and after each preparation, so that both have
    the same load on the machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        corpus = prepare(replace(config, cache=str(root / "learn")), vocab_size)
        paths = [corpus.folder / name for name in TOKENIZER_FILES]
        file = next(path for path in paths if path.is_file())
        size, texts = corpus.sizes["train"], _texts(corpus)
        rows: list[Record] = []
        for n in megabytes:
            info(f"preparing {n:,} MB")
            data = root / "data.jsonl"
            n_bytes = _write_copies(texts, n * 1_000_000, data)
            before = _library_throughput(file, texts)
            cache = root / "cache"
            copies = replace(config, path=(str(data),), format="jsonl", cache=str(cache))
            found = _prepare_alone(copies, vocab_size)
            shutil.rmtree(cache)
            after = _library_throughput(file, texts)
            library, own = max(before, after), n_bytes / found["seconds"] / 1e6
            rows.append(
                {
                    "megabytes": n_bytes / 1e6,
                    "mb_per_second": own,
                    "library_mb_per_second": library,
                    "ratio": own / library,
                    "peak_mb": found["peak_mb"],
                    "learning_seconds": found["learning"],
                }
            )
        return {
            "tokenizer": str(config.tokenizer),
            "vocab_size": vocab_size,
            "tokens_per_byte": size.tokens / size.bytes,
            "rows": rows,
            "machine": machine(),
        }


def table(record: Record) -> str:
    """Return the throughput and memory of each size as a Markdown table."""
    lines = [
        f"{record['tokenizer']}, {record['vocab_size']:,} tokens: "
        f"{record['tokens_per_byte']:.4f} tokens per byte",
        "",
        "| text | prepare | library alone | ratio | peak memory | learning |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['megabytes']:,.0f} MB | {row['mb_per_second']:.1f} MB/s "
            f"| {row['library_mb_per_second']:.1f} MB/s | {row['ratio']:.2f} "
            f"| {row['peak_mb']:,.0f} MB | {row['learning_seconds']:.0f} s |"
        )
    return "\n".join(lines)


def _texts(corpus: Corpus) -> list[str]:
    """Return all documents of a corpus."""
    tokenizer, found = corpus.tokenizer(), []
    for name in corpus.sizes:
        split = corpus.split(name)
        for first, last in pairwise([*split.starts.tolist(), len(split)]):
            found.append(tokenizer.decode(split.tokens[first:last].tolist()).decode())
    return found


def _write_copies(texts: list[str], n_bytes: int, path: Path) -> int:
    """Write documents to a JSONL file, again and again, until it has enough text."""
    written = 0
    with open(path, "w") as file:
        for text in cycle(texts):
            if written >= n_bytes:
                break
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return written


def _library_throughput(file: Path, texts: list[str]) -> float:
    """Return the MB/s of the library's own batch method on all cores, from memory to memory.

    The better of whole documents and chunks counts.
    """
    encode = _library_method(file)
    chosen = list(islice(cycle(texts), max(1, LIBRARY_BYTES * len(texts) // sum(map(len, texts)))))
    n_bytes = sum(len(text.encode()) for text in chosen)
    best = 0.0
    for batch in (
        chosen,
        [chunk for text in chosen for chunk in divide(text, CHUNK_CHARS, LINE_STARTS) if chunk],
    ):
        start = time.perf_counter()
        encode(batch)
        best = max(best, n_bytes / (time.perf_counter() - start) / 1e6)
    return best


def _library_method(file: Path) -> Callable[[list[str]], object]:
    if file.suffix == ".json":
        library = import_extra("tokenizers", "a BPE vocabulary")
        encode: Callable[[list[str]], object] = library.Tokenizer.from_file(
            str(file)
        ).encode_batch_fast
        return encode
    library = import_extra("sentencepiece", "a SentencePiece vocabulary")
    model = library.SentencePieceProcessor(model_file=str(file))
    return lambda texts: model.encode(texts, num_threads=os.cpu_count() or 1)


def _prepare_alone(config: DataConfig, vocab_size: int | None) -> dict[str, float]:
    command = [sys.executable, "-c", _PREPARE, json.dumps(vars(config)), json.dumps(vocab_size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"preparing failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure the preparation of text next to the tokenizer library alone, and its peak memory.

    A vocabulary is learned from the text. Then copies of the text are prepared.
    """

    path: tuple[str, ...] = ()
    """Text files, folders or patterns; by default the sources of Python's standard library."""
    tokenizer: Literal["bpe"] = "bpe"
    """Tokenizer to learn."""
    vocab_size: int = 8192
    """Size of its vocabulary."""
    megabytes: tuple[int, ...] = (20, 200)
    """Sizes of the text to prepare; the text is repeated to reach them."""


def measure(options: Options) -> Record:
    """Measure throughput and memory for all sizes."""
    check_positive(vocab_size=options.vocab_size, megabytes=options.megabytes)
    config = DataConfig(path=options.path, tokenizer=options.tokenizer)
    return run(config, options.vocab_size, options.megabytes)


if __name__ == "__main__":
    main(Options, measure, table)
