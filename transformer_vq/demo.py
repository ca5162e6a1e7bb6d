"""The parts of `tvq demo`: attention in linear time next to Definition 3.1, and a small model.

The equality is checked in float64, forward and backward. The model, trained in minutes, is compared
with n-gram models of bytes: counts of the training split, with Witten-Bell smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict, get_args

import numpy as np
import torch
from torch import Tensor

from transformer_vq.config import AttentionConfig, HeadType, Reduction
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.prepare import prepare
from transformer_vq.generation.decode import generate
from transformer_vq.generation.text import generate_text
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.quadratic import quadratic_vq_attention
from transformer_vq.ops.state import VQState
from transformer_vq.training.checkpoint import load_model, load_run, read_config, read_tokenizer
from transformer_vq.training.evaluate import evaluate

PROMPT = "import os\n\ndef "
BOOKS_PROMPT = "It was"
HEAD_TYPES: tuple[HeadType, ...] = ("shga", "mqa", "mha")  # the head types of the paper
ROUNDING = 1e-12  # of float64, in relative differences
Row = tuple[HeadType, Reduction, float, float]


class DemoRecord(TypedDict):
    """Bits per byte of the test split for three models, and a generated text."""

    order_0: float
    order_2: float
    tiny: float
    sample: str


def relative_rms(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `want`."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def differences(seq_len: int = 1000, block_len: int = 64) -> Iterator[Row]:
    """Yield (head type, reduction, error of the output, largest error of the gradients).

    Errors are relative RMS differences.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # The kernels need a GPU and have no float64.
    reductions = get_args(Reduction)
    b, n_code = 2, 48
    for head_type in HEAD_TYPES:
        heads = AttentionConfig(d_model=64, d_k=16, d_v=24, head_type=head_type).heads
        h, g, d_k, d_v = heads.n_kv_head, heads.n_group, heads.d_k, heads.d_v
        codebook = normal(h, n_code, d_k)
        z = torch.randint(n_code, (b, h, seq_len), generator=generator)
        k_hat = torch.stack([codebook[head, z[:, head]] for head in range(h)], dim=1)
        q, v = normal(b, h, g, seq_len, d_k), normal(b, h, seq_len, d_v)
        by_distance = normal(b, h, g, seq_len, block_len + 1)
        leaves = [x.requires_grad_() for x in (q, k_hat, v, by_distance)]
        want = quadratic_vq_attention(q, k_hat, v, by_distance)
        probe = normal(*want.shape)
        want_grads = torch.autograd.grad((want * probe).sum(), leaves)
        for reduction in reductions:
            state = VQState.empty(b, h, block_len, d_k, d_v, n_code, dtype=torch.float64)
            got, _ = vq_attention(q, k_hat, z, v, codebook, by_distance, state, reduction=reduction)
            grads = torch.autograd.grad((got * probe).sum(), leaves)
            worst = max(map(relative_rms, grads, want_grads))
            yield head_type, reduction, relative_rms(got.detach(), want.detach()), worst


def differences_line(rows: Sequence[Row]) -> str:
    """Return the largest differences in one line."""
    output, gradients = max(row[2] for row in rows), max(row[3] for row in rows)
    verdict = "equal" if max(output, gradients) < ROUNDING else "DIFFER FROM"
    return (
        f"{len(rows)} combinations of heads and reductions {verdict} Definition 3.1: largest "
        f"relative difference {output:.0e} (outputs), {gradients:.0e} (gradients)"
    )


def ngram_bits_per_byte(corpus: Corpus, max_order: int = 2) -> list[float]:
    """Return the bits per byte of the test split for orders 0 to `max_order`.

    Order k predicts a byte from its counts after the k preceding ones in the training split, mixed
    with order k - 1. Contexts that were followed by many distinct bytes give it more weight.
    """
    n = corpus.vocab_size
    train, test = (
        np.concatenate([np.zeros(max_order, np.int64), corpus.split(name).tokens])
        for name in ("train", "test")
    )
    probability: np.ndarray = np.full(len(test) - max_order, 1 / n)
    found = []
    for order in range(max_order + 1):
        counts = np.bincount(_grams(train, order, max_order, n), minlength=n ** (order + 1))
        by_context = counts.reshape(-1, n)
        total, distinct = by_context.sum(1), (by_context > 0).sum(1)
        grams = _grams(test, order, max_order, n)
        context = grams // n
        mixed = counts[grams] + distinct[context] * probability
        mixed = mixed / np.maximum(total[context] + distinct[context], 1)
        probability = np.where(total[context] > 0, mixed, probability)
        found.append(float(-np.log2(probability).sum()) / corpus.sizes["test"].bytes)
    return found


def _grams(tokens: np.ndarray, order: int, max_order: int, n: int) -> np.ndarray:
    """Return each token with its `order` predecessors as one integer."""
    end = len(tokens)
    code: np.ndarray = np.zeros(end - max_order, np.int64)
    for back in range(order, -1, -1):
        code = code * n + tokens[max_order - back : end - back]
    return code


def books_sample() -> str:
    """Return a text that the model in the package generates."""
    model, tokenizer, _ = load_run("books")
    text = generate_text(model, tokenizer, BOOKS_PROMPT, 150, temperature=0.7, seed=1)
    return BOOKS_PROMPT + text


def measure(run: Path) -> DemoRecord:
    """Evaluate a finished run and two n-gram models on the test split, and generate a text."""
    windowed = evaluate(run, protocols=["windowed"]).protocols["windowed"]
    n_gram = ngram_bits_per_byte(prepare(read_config(run).data))
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
