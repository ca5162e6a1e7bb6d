"""What commands print: results as text and as plain values, and mistakes in one line."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.data.corpus import Corpus
from transformer_vq.progress import short
from transformer_vq.training.evaluate import RunEvaluation
from transformer_vq.training.sizes import Sizes


def evaluation_table(evaluation: RunEvaluation) -> str:
    """Every protocol with its figures and its loss by position."""
    lines = [
        f"{evaluation.run} ({evaluation.checkpoint}), {evaluation.split} of {evaluation.dataset}"
    ]
    how = {
        "windowed": f"fresh state every {evaluation.seq_len:,} tokens",
        "streaming": "one state through every document",
    }
    for result in evaluation.protocols.values():
        counts = [f"{result.tokens:,} tokens", f"{result.bytes:,} bytes"]
        figures = [
            f"{result.bits_per_byte:.4f} bits per byte",
            f"{result.nats_per_token:.4f} nats per token",
        ]
        if result.word_perplexity is not None:
            counts.append(f"{result.words:,} words")
            figures.append(f"word-level perplexity {result.word_perplexity:,.4g}")
        lines += [
            "",
            f"{result.protocol} ({how[result.protocol]}), {', '.join(counts)}:",
            ", ".join(figures),
            "",
            "| tokens before | tokens | nats per token |",
            "| ---: | ---: | ---: |",
        ]
        for row in result.by_position:
            span = f"{row.first:,}" if row.first == row.last else f"{row.first:,} - {row.last:,}"
            lines.append(f"| {span} | {row.tokens:,} | {row.nats_per_token:.4f} |")
    return "\n".join(lines)


def sizes_table(name: str, config: RunConfig, result: Sizes) -> str:
    """What a run costs in memory and arithmetic."""
    train = config.train
    tokens = train.batch_size * train.backprop_len
    flops = result.train_flops * tokens * train.steps
    forward, training = short(result.forward_flops), short(result.train_flops)
    parts = (
        f"weights and gradients {_bytes(2 * result.weight_bytes)}, optimizer "
        f"{_bytes(result.optimizer_bytes)}, activations {_bytes(result.activation_bytes)}"
    )
    n = config.parallel.n_processes
    where = f" on each of {n} devices" if n > 1 else ""
    rows = {
        "parameters": f"{result.parameters:,}",
        "numbers in codebooks": f"{result.codebooks:,}",
        "FLOPs per token": f"{forward} forward, {training} training",
        "tokens per update": f"{tokens:,}",
        "updates": f"{train.steps:,} ({short(tokens * train.steps)} tokens, {flops:.2e} FLOPs)",
        "state per sequence": _bytes(result.state_bytes),
        "weights": _bytes(result.weight_bytes) + where,
        "training, estimate": f"{_bytes(result.train_bytes)}{where}: {parts}",
    }
    title = f"{name}: {config.model.head_type}, {config.model.attention} attention"
    return "\n".join([title, *(f"  {label:<22} {value}" for label, value in rows.items())])


def corpus_table(corpus: Corpus) -> str:
    """The splits of a corpus and how large they are."""
    lines = [f"{corpus.dataset} in {corpus.folder}, vocabulary of {corpus.vocab_size:,}"]
    for name, size in corpus.sizes.items():
        words = "" if size.words is None else f", {size.words:,} words"
        lines.append(
            f"{name:>10}: {size.tokens:,} tokens, {size.documents:,} documents, "
            f"{size.bytes:,} bytes{words}"
        )
    return "\n".join(lines)


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    return {
        "dataset": corpus.dataset,
        "folder": str(corpus.folder),
        "vocab_size": corpus.vocab_size,
        "splits": {name: vars(size) for name, size in corpus.sizes.items()},
    }


def _bytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"


def print_any_text() -> None:
    """Let stdout accept text that it cannot encode: names of files, or prompts, of any bytes.

    Bytes that could not be decoded are printed as they were, other characters as escapes.
    """

    def encode(error: UnicodeError) -> tuple[str | bytes, int]:
        try:
            return codecs.lookup_error("surrogateescape")(error)
        except UnicodeError:
            return codecs.lookup_error("backslashreplace")(error)

    codecs.register_error("tvq", encode)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="tvq")


def drop_output() -> None:
    """Forget what is still to be printed if stdout does not accept it."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def reason(error: OSError) -> str:
    """Return what failed, and with which file."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"cannot use {error.filename}: {error.strerror}"


def one_line(message: str) -> str:
    """Without line ends, numbers of system errors, control characters and endless words."""
    line = re.sub(r"\[Errno \d+\] ", "", " ".join(message.split()))
    line = re.sub(r"[^\s:;,'\"]{300,}", lambda word: f"{word[0][:60]}...", line)
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in line)
