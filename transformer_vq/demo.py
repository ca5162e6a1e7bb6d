"""The parts of `tvq demo`: attention in linear time next to Definition 3.1, and generated texts.

The equality is checked in float64, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from transformer_vq.config import AttentionConfig, HeadType, Reduction
from transformer_vq.doctor import relative_error
from transformer_vq.generation.text import generate_text
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.quadratic import quadratic_vq_attention
from transformer_vq.ops.state import VQState
from transformer_vq.training.checkpoint import load_run

HEAD_TYPES: tuple[HeadType, ...] = ("shga", "mqa", "mha")  # the head types of the paper
ROUNDING = 1e-12  # of float64, in relative differences
Row = tuple[HeadType, Reduction, float, float]


def differences(seq_len: int = 1000, block_len: int = 64) -> Iterator[Row]:
    """Yield (head type, reduction, error of the output, largest error of the gradients).

    Errors are relative RMS differences.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

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
        for reduction in get_args(Reduction):
            state = VQState.empty(b, h, block_len, d_k, d_v, n_code, dtype=torch.float64)
            got, _ = vq_attention(q, k_hat, z, v, codebook, by_distance, state, reduction=reduction)
            grads = torch.autograd.grad((got * probe).sum(), leaves)
            worst = max(map(relative_error, grads, want_grads))
            yield head_type, reduction, relative_error(got, want), worst


def differences_line(rows: Sequence[Row]) -> str:
    """Return the largest differences in one line."""
    output, gradients = max(row[2] for row in rows), max(row[3] for row in rows)
    verdict = "equal" if max(output, gradients) < ROUNDING else "DIFFER FROM"
    return (
        f"{len(rows)} combinations of heads and reductions {verdict} Definition 3.1: largest "
        f"relative difference {output:.0e} (outputs), {gradients:.0e} (gradients)"
    )


def differences_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of all differences."""
    lines = ["| heads | reduction | output | gradients |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {heads} | {name} | {y:.1e} | {grad:.1e} |" for heads, name, y, grad in rows]
    return "\n".join(lines)


def sample(run: str | Path, prompt: str, n_tokens: int, temperature: float = 1.0) -> str:
    """Return a text that the model of a finished run generates, with the prompt."""
    model, tokenizer, _ = load_run(run)
    text = generate_text(model, tokenizer, prompt, n_tokens, temperature=temperature, seed=1)
    return prompt + text
