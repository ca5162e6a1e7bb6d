"""The results of `make demo`: a model trained in minutes, compared with n-gram models."""

from __future__ import annotations

from pathlib import Path

from transformer_vq.bench.ngram import bits_per_byte
from transformer_vq.bench.records import DemoRecord
from transformer_vq.data.corpus import prepare
from transformer_vq.generation.decode import generate
from transformer_vq.generation.text import generate_text
from transformer_vq.training.checkpoint import load_model, load_run, read_config, read_tokenizer
from transformer_vq.training.evaluate import evaluate

PROMPT = "import os\n\ndef "
BOOKS_PROMPT = "It was"


def books_sample() -> str:
    """Return a text that the model in the package generates."""
    model, tokenizer, _ = load_run("books")
    text = generate_text(model, tokenizer, BOOKS_PROMPT, 150, temperature=0.7, seed=1)
    return BOOKS_PROMPT + text


def measure(run: Path) -> DemoRecord:
    """Evaluate a finished run and two n-gram models on the test split, and generate a text."""
    config = read_config(run)
    windowed = evaluate(run, protocols=["windowed"]).protocols["windowed"]
    n_gram = bits_per_byte(prepare(config.data))
    model, _ = load_model(run)
    tokenizer = read_tokenizer(run)
    prompt = [tokenizer.bos, *tokenizer.encode(PROMPT)]
    tokens = generate(model, prompt, 400, top_p=0.95, seed=1)
    return {
        "order_0": n_gram[0],
        "order_2": n_gram[2],
        "tiny": windowed.bits_per_byte,
        "sample": PROMPT + tokenizer.decode(tokens).decode(errors="replace"),
    }


def table(record: DemoRecord) -> str:
    """Return a Markdown table of the bits per byte of three models."""
    return "\n".join(
        [
            "| model | test bits per byte |",
            "| --- | ---: |",
            f"| order 0: byte frequencies | {record['order_0']:.3f} |",
            f"| order 2: given the two preceding bytes | {record['order_2']:.3f} |",
            f"| Transformer-VQ, `tiny` | {record['tiny']:.3f} |",
        ]
    )
