"""Inspection: surprisal of every token, codes of every key, and where attention goes.

The model runs on one block of tokens at a time. A forward hook on every attention layer recomputes
the weights of that block, which the layer itself does not keep: over the codes of the cache, the
window before the block, and the block. So time and memory are linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.device import evaluating
from transformer_vq.errors import UserError
from transformer_vq.generation.prefill import Context, check_prompts
from transformer_vq.nn.attention import AttentionOutput, VQAttention
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ
from transformer_vq.ops.position import local_bias
from transformer_vq.ops.quadratic import attention_weights
from transformer_vq.ops.state import VQState


@dataclass(frozen=True)
class LayerInspection:
    """Codes and attention weights of one attention layer, for h key heads and t tokens.

    Weights are averages over the query heads of a key head. The shares `window` and `cache` sum to
    1. They do not depend on how a sequence is split into a context and tokens.
    """

    codes: Tensor
    """[h, t] of int64: the code of every key."""
    window: Tensor
    """[h, t]: share of the attention weight on the token itself and the `block_len` before it."""
    cache: Tensor
    """[h, t]: share on everything older, the compressive cache."""
    top_codes: Tensor
    """[h, t, n] of int64: codes of the cache with the most weight, in descending order.

    Ignore codes with weight 0, which fill the list if the cache has fewer codes.
    """
    top_weights: Tensor
    """[h, t, n]: weight of each of these codes, the sum over its tokens."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; weights have 4 decimals."""
        return {name: _plain(x, decimals=4) for name, x in vars(self).items()}


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_tokens`; all tensors are on the CPU."""

    surprisal: Tensor
    """[t]: bits of each token given all tokens before it; NaN if there are none."""
    layers: tuple[LayerInspection, ...]
    """One per attention layer, from the input to the output."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; surprisal has 3 decimals, and None instead of NaN."""
        surprisal = _plain(self.surprisal, decimals=3)
        return {
            "surprisal": [x if math.isfinite(x) else None for x in surprisal],
            "layers": [layer.to_dict() for layer in self.layers],
        }


def inspect_tokens(
    model: TransformerVQ, tokens: Sequence[int], *, context: Context | None = None, n_codes: int = 5
) -> Inspection:
    """Return surprisal, codes and attention weights of a sequence, in linear time and memory.

    tokens: token ids of one sequence from its start, usually the tokenizer's `bos`, or those after
    `context`, a result of `prefill`. n_codes: number of codes of the cache to list per token, at
    most `n_code` of the model. The model runs without dropout, and its training mode is restored.
    """
    check_prompts([tokens])
    ids = torch.as_tensor(tokens)
    model.check_tokens(ids.unsqueeze(0))
    if n_codes < 1:
        raise UserError(f"n_codes={n_codes}: must be at least 1")
    layers = model.codebook_layers()
    if not layers:
        raise UserError("a model with attention='full' has no codes to inspect; use attention='vq'")
    if context is not None and len(context.logits) != 1:
        raise UserError(f"the context has {len(context.logits)} rows; use a context of one row")
    ids, block_len = ids.to(next(model.parameters()).device), model.config.block_len
    blocks: list[list[LayerInspection]] = [[] for _ in layers]
    surprisal = [torch.full((1,), torch.nan)]
    state: ModelState | None = None
    if context is not None:
        surprisal, state = [_bits(context.logits, ids[:1])], context.state
    thread = get_ident()

    def record(layer: nn.Module, args: Any, kwargs: Any, output: AttentionOutput[VQState]) -> None:
        if get_ident() == thread:  # the model may be in use elsewhere, as in a server
            assert isinstance(layer, VQAttention)
            x, before = args
            found = _block(layer, x, kwargs["sinusoids"], before, output.state, n_codes)
            blocks[layers.index(layer)].append(found)

    with evaluating(model), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(record, with_kwargs=True))
        for start in range(0, len(ids), block_len):
            stop = start + block_len
            output: ModelOutput = model(ids[start:stop].unsqueeze(0), state)
            state = output.state
            targets = ids[start + 1 : stop + 1]  # the last token has none
            surprisal.append(_bits(output.logits[0, : len(targets)], targets))
    return Inspection(torch.cat(surprisal), tuple(map(_join, blocks)))


def _bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the surprisal of each target. logits: [t, vocab_size], targets: [t] -> [t]."""
    nats = F.cross_entropy(logits, targets.to(logits.device), reduction="none")
    return (nats / math.log(2)).cpu()


def _block(
    layer: VQAttention, x: Tensor, sinusoids: Tensor, before: VQState, after: VQState, n_codes: int
) -> LayerInspection:
    """Return the inspection of one block: the weights of Theorem 3.7 instead of its output.

    x: [1, i, d_model] input of the layer, before, after: its state before and after the block.
    """
    n_token, n_code, window_len = x.shape[1], layer.config.n_code, before.k.shape[-2]

    # 1. Queries, and the quantized keys and codes of the window and of this block.
    q, q_position = layer.queries(layer.norm(x))
    k_local = torch.cat([before.k, after.k[..., -n_token:, :]], dim=-2)
    z_local = torch.cat([before.z, after.z[..., -n_token:]], dim=-1).squeeze(0)  # [h, L + i]

    # 2. Scores of the codes and of the local keys.
    older = -torch.inf if before.cache is None else 0.0
    bias = local_bias(layer.by_distance(q_position, sinusoids, None), older)  # [b, h, g, i, L + i]
    codebook = layer.quantizer.codebook.to(q.dtype)
    scores_cache = torch.einsum("bhgik,hsk->bhgis", q, codebook)
    scores_local = torch.einsum("bhgik,bhjk->bhgij", q, k_local.to(q.dtype)) + bias

    # 3. The number of keys behind each column: tokens of a code, and 0 for an empty slot.
    present = k_local.new_ones(k_local.shape[:-1], dtype=torch.int64)  # [b, h, L + i]
    present[..., :window_len] = before.window_valid.unsqueeze(1)
    no_cache = present.new_zeros(*present.shape[:2], n_code)
    count = no_cache if before.cache is None else before.cache.count
    multiplicity = torch.cat([count, present], dim=-1).unsqueeze(2)

    # 4. One softmax over all columns, averaged over the query heads: [h, i, s + L + i].
    scores = torch.cat([scores_cache, scores_local], dim=-1)
    weights = attention_weights(scores, None, multiplicity).mean(2).squeeze(0)
    of_codes, local = weights.split([n_code, window_len + n_token], dim=-1)

    # 5. Local column j < i is more than L tokens older than query i: it counts as cache.
    columns = z_local.unsqueeze(1).expand_as(local)
    of_codes = of_codes.scatter_add(-1, columns, local.tril(-1))
    top = of_codes.topk(min(n_codes, n_code), dim=-1)
    return LayerInspection(
        codes=z_local[:, -n_token:].cpu(),
        window=local.triu().sum(-1).cpu(),
        cache=of_codes.sum(-1).cpu(),
        top_codes=top.indices.cpu(),
        top_weights=top.values.cpu(),
    )


def _join(blocks: list[LayerInspection]) -> LayerInspection:
    """Return one inspection for consecutive blocks of a layer."""
    columns = zip(*(vars(block).values() for block in blocks), strict=True)
    return LayerInspection(*(torch.cat(column, dim=1) for column in columns))


def _plain(x: Tensor, decimals: int) -> list[Any]:
    """Return nested lists; floating-point numbers are rounded."""
    x = x.double().round(decimals=decimals) if x.is_floating_point() else x
    values: list[Any] = x.tolist()
    return values
