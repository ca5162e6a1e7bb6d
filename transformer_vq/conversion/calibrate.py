"""Codebooks of a converted model, from the keys of texts.

Layer by layer, the full attention of the model computes queries and keys of some texts. k-means
finds the codes in the metric of the queries that will meet them: with H = mean of q q^T over far
queries q, (k - c)^T H (k - c) is the mean squared error of a score, and the metric M is H^(1/2).
Half of that error, averaged over the keys of a code, is its bias: exp(q . c) underestimates the
mean of exp(q . k) by that much. Keys with the largest errors are worth a slot.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_vq.data.paths import DataError
from transformer_vq.data.text import find_inputs, python_sources
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import meta_device
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import nearest_code
from transformer_vq.nn.rotary import RotaryFullAttention, RotaryVQAttention
from transformer_vq.ops.rotary import rotate, rotations
from transformer_vq.progress import info, progress_bar

ROW = 4096  # tokens per text
N_TOKENS = 2**16
EXACT_SHARE = (
    0.1  # of the keys; with 256 slots, exact tokens are on average 2,560 tokens old or less
)
ITERATIONS = 12
READ_LIMIT = 2**28  # bytes; texts after them are not read
BOOK = Path(__file__).parents[1] / "serve" / "page" / "document.txt"


def calibrate(
    model: TransformerVQ,
    tokenizer: Tokenizer,
    paths: Sequence[str] = (),
    *,
    n_tokens: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Set the codebooks, biases and thresholds of a model with rotary positions, in place.

    paths: texts; by default a book in the package and the sources of Python's standard library.
    Memory depends on n_tokens, not on the amount of text. Return a record of what was done.
    """
    device = next(model.parameters()).device
    rows = text_rows(tokenizer, paths, -(-(n_tokens or N_TOKENS) // ROW), seed)
    named = ", ".join(paths) or "a book and the sources of Python's standard library"
    info(f"calibrating on {rows.numel():,} tokens of {named}")
    generator = torch.Generator().manual_seed(seed)
    errors = []
    with torch.no_grad(), progress_bar("codebooks", len(model.branches), "layers") as advance:
        x = model.embed(rows.to(device))
        for branch in model.branches:
            full = None
            if isinstance(branch, RotaryVQAttention):
                errors.append(_calibrate_layer(branch, x, generator))
                full = _full_attention(branch)
            for row in x:  # one at a time, because activations are wide
                row += branch(row) if full is None else full(row.unsqueeze(0)).y[0]
            advance(1)
    error = sum(errors) / len(errors)
    record = {"texts": list(paths) or ["book in the package", "Python standard library"]}
    return record | {"tokens": rows.numel(), "seed": seed, "score_error": error}


def text_rows(tokenizer: Tokenizer, paths: Sequence[str], n_rows: int, seed: int) -> Tensor:
    """Return n_rows random pieces of the texts, as tokens: [n, ROW]; fewer if texts are short."""
    inputs = find_inputs(paths) if paths else [*find_inputs([str(BOOK)]), *python_sources()]
    rng = random.Random(seed)
    inputs = rng.sample(inputs, len(inputs))

    def pieces() -> Iterator[bytes]:
        n_read, size = 0, 6 * ROW
        for item in inputs:
            for document in item.read():
                held = b""
                for chunk in document:
                    held += chunk
                    n_read += len(chunk)
                    while len(held) >= size:
                        yield held[:size]
                        held = held[size:]
                if len(held) >= size // 2:
                    yield held
                if n_read > READ_LIMIT:
                    return

    kept: list[bytes] = []  # a reservoir: every piece has the same chance
    for number, piece in enumerate(pieces()):
        if len(kept) < n_rows:
            kept.append(piece)
        elif (place := rng.randrange(number + 1)) < n_rows:
            kept[place] = piece
    rows = [tokenizer.encode(piece.decode("utf-8", errors="ignore"))[:ROW] for piece in kept]
    length = min(ROW, max(map(len, rows), default=0))
    rows = [row for row in rows if len(row) >= length]
    if length < ROW // 4:
        named = ", ".join(paths)
        raise DataError(f"{named} has no text of {ROW} tokens to calibrate on; give longer texts")
    return torch.tensor(rows)


def _full_attention(layer: RotaryVQAttention) -> RotaryFullAttention:
    """Return full attention with the weights of a layer."""
    unused: dict[str, Any] = {"n_sink": 0, "n_exact": 0, "quantize_window": True}
    config = replace(layer.config, attention="full", **unused)
    with meta_device():
        full = RotaryFullAttention(**vars(config))
    full.load_state_dict(dict(layer.named_parameters()), assign=True)
    return full.eval()


def _calibrate_layer(layer: RotaryVQAttention, x: Tensor, generator: torch.Generator) -> float:
    """Set the buffers of a layer from its inputs, [n, t, d_model]; return the mean squared error.

    The error is that of the scores of far tokens.
    """
    config, d_k = layer.config, layer.d_k
    far = rotations(torch.tensor([config.distant]), d_k, config.rope_theta, torch.float64)
    second, keys = torch.zeros(layer.n_kv_head, d_k, d_k, dtype=torch.float64), []
    for row in x:
        normed = layer.norm(row.unsqueeze(0))
        q = layer.plain_queries(normed)[0].double().cpu() * d_k**-0.25  # [h, g, t, k]
        q = rotate(q, far).flatten(1, 2)
        second += q.mT @ q / q.shape[1]
        keys.append(layer.keys_and_values(normed)[0][0, :, config.n_sink :])
    k = torch.cat(keys, dim=1)  # [h, n, k]
    second /= len(x)
    second += 1e-3 * second.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(d_k)
    values, vectors = torch.linalg.eigh(second)
    metric = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    quantizer = layer.quantizer
    assert quantizer.metric is not None
    assert quantizer.code_bias is not None
    quantizer.metric.copy_(metric)
    measured = k @ quantizer.metric
    total = 0.0
    for head, points in enumerate(measured):
        z, n = k_means(points, config.n_code, generator), torch.zeros(config.n_code)
        n = n.to(points).index_add_(0, z, points.new_ones(len(z)))
        mean = torch.zeros(config.n_code, d_k).to(points).index_add_(0, z, k[head])
        mean /= n.clamp(min=1).unsqueeze(-1)
        error = (points - (mean @ quantizer.metric[head])[z]).square().sum(-1)
        of_code = torch.zeros_like(n).index_add_(0, z, error) / n.clamp(min=1)
        # Counts as in training: their running mean is one.
        count = (n * config.n_code / len(z)).clamp(min=0.1)
        quantizer.c_sum[head], quantizer.c_count[head] = mean * count.unsqueeze(-1), count
        quantizer.code_bias[head] = of_code / 2
        layer.exact_above[head] = torch.quantile(error[: 2**20], 1 - EXACT_SHARE)
        total += float(error.mean())
    quantizer.started.fill_(True)
    return total / len(measured)


def k_means(x: Tensor, n_code: int, generator: torch.Generator) -> Tensor:
    """Return the cluster of each point, by Lloyd's algorithm. x: [n, d]."""
    order = torch.randperm(len(x), generator=generator).to(x.device)
    centers = x[order[torch.arange(n_code) % len(x)]]
    for step in range(ITERATIONS + 1):
        z = torch.cat([_nearest(part, centers) for part in x.split(8192)])
        if step == ITERATIONS:
            break
        n = torch.zeros(n_code).to(x).index_add_(0, z, x.new_ones(len(z)))
        mean = torch.zeros_like(centers).index_add_(0, z, x) / n.clamp(min=1).unsqueeze(-1)
        fresh = x[torch.randint(len(x), (n_code,), generator=generator).to(x.device)]
        centers = torch.where((n > 0).unsqueeze(-1), mean, fresh)  # an empty cluster starts again
    return z


def _nearest(x: Tensor, centers: Tensor) -> Tensor:
    return nearest_code(x[None, None], centers[None])[0, 0]
