"""Causal attention in linear time (Theorems 3.6 and 3.7, Code 1): state in, state out.

A segment of any length is cut into blocks of L tokens, counted from its own start. A block attends
to the cache (everything older than L tokens before it), to the L tokens before it, and to itself,
under one softmax. The local bias vanishes beyond distance L and the cache is lossless, so where a
sequence is cut into segments does not change the result.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from transformer_vq.ops.cache import CacheStats, accumulation_dtype, block_stats
from transformer_vq.ops.position import local_bias
from transformer_vq.ops.quadratic import Phi, attention_weights
from transformer_vq.ops.reductions import exclusive_prefix
from transformer_vq.ops.state import AttentionState


def vq_attention(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor,
    state: AttentionState,
    *,
    reduction: str = "auto",
    phi: Phi | None = None,
    grad_through_cache: bool = True,
) -> tuple[Tensor, AttentionState]:
    """W V of Definition 3.1 for the next segment of a sequence, and the state after it.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] positional scores for distances L, ..., 0
    -> [b, h, g, t, v]. A state without a cache gives attention to the last L tokens only.
    reduction: "serial", "matmul", "associative", or "input_scan" for one block at a time.
    """
    seq_len, block_len = q.shape[-2], state.k.shape[-2]
    whole = seq_len - seq_len % block_len
    step = block_len if reduction == "input_scan" else max(whole, 1)
    starts = [*range(0, whole, step), *([whole] if whole < seq_len else [])]
    outputs = []
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        part = slice(start, stop)
        output, state = _attend_blocks(
            q[..., part, :],
            k_hat[..., part, :],
            z[..., part],
            v[..., part, :],
            codebook,
            by_distance[..., part, :],
            state,
            reduction=reduction,
            phi=phi,
            grad_through_cache=grad_through_cache,
        )
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state


def _attend_blocks(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor,
    state: AttentionState,
    *,
    reduction: str,
    phi: Phi | None,
    grad_through_cache: bool,
) -> tuple[Tensor, AttentionState]:
    """The same for whole blocks, or for one block that is shorter than L."""
    assert state.z is not None
    seq_len, window_len = q.shape[-2], state.k.shape[-2]
    n_query = min(seq_len, window_len)
    n_blocks = seq_len // n_query

    # Before block r stands block r - 1, before the first one the window.
    k_prev = _shift_in(state.k, k_hat, n_blocks, dim=-2)
    v_prev = _shift_in(state.v, v, n_blocks, dim=-2)
    z_prev = _shift_in(state.z, z, n_blocks, dim=-1)
    later = state.window_valid.new_ones(q.shape[0], (n_blocks - 1) * window_len)
    valid_prev = torch.cat([state.window_valid, later], dim=-1)[:, None]  # [b, 1, r * j]

    # Tokens leave the window for the cache when the block after theirs is done.
    cache = prefix = None
    if state.cache is not None:
        leaving = slice(0, seq_len)
        blocks = block_stats(
            z_prev[..., leaving].unflatten(-1, (n_blocks, n_query)),
            (v_prev if grad_through_cache else v_prev.detach())[..., leaving, :].unflatten(
                -2, (n_blocks, n_query)
            ),
            codebook.shape[-2],
            valid_prev[..., leaving].unflatten(-1, (n_blocks, n_query)),
        )
        initial = state.cache if grad_through_cache else state.cache.detach()
        prefix, cache = exclusive_prefix(blocks, initial, reduction)

    output = _weigh(
        q.unflatten(-2, (n_blocks, n_query)),
        k_prev.unflatten(-2, (n_blocks, window_len)),
        v_prev.unflatten(-2, (n_blocks, window_len)),
        valid_prev.unflatten(-1, (n_blocks, window_len)),
        k_hat.unflatten(-2, (n_blocks, n_query)),
        v.unflatten(-2, (n_blocks, n_query)),
        codebook,
        prefix,
        by_distance.unflatten(-2, (n_blocks, n_query)),
        phi,
    )
    after = AttentionState(
        k=_last(state.k, k_hat, dim=-2),
        v=_last(state.v, v, dim=-2),
        position=state.position + seq_len,
        z=_last(state.z, z, dim=-1),
        cache=cache,
        sinusoid_mask=state.sinusoid_mask,
    )
    return output.flatten(-3, -2), after


def _weigh(
    q: Tensor,
    k_prev: Tensor,
    v_prev: Tensor,
    valid_prev: Tensor,
    k_present: Tensor,
    v_present: Tensor,
    codebook: Tensor,
    cache: CacheStats | None,
    by_distance: Tensor,
    phi: Phi | None,
) -> Tensor:
    """Attention of blocks of queries to their cache, previous block and own block.

    q: [b, h, g, r, i, k], k_*: [b, h, r, j, k], v_*: [b, h, r, j, v], valid_prev: [b, 1, r, j],
    cache.mean: [b, h, r, s, v], by_distance: [b, h, g, r, i, L + 1] -> [b, h, g, r, i, v].
    """
    window_len, dtype = k_prev.shape[-2], v_present.dtype

    # 1. Scores of the keys in sight: content, and a local bias that also holds the causal mask.
    bias = local_bias(by_distance, older=0.0 if cache is not None else -torch.inf)
    scores_prev = torch.einsum("bhgrik,bhrjk->bhgrij", q, k_prev) + bias[..., :window_len]
    scores_present = torch.einsum("bhgrik,bhrjk->bhgrij", q, k_present) + bias[..., window_len:]

    # 2. Each column of scores stands for a number of keys: an empty slot of the window for none,
    #    a code of the cache for as many as it has swallowed.
    one = torch.ones((), dtype=accumulation_dtype(dtype), device=q.device)
    columns = [
        (scores_prev, valid_prev * one, v_prev),
        (scores_present, one.expand(*k_present.shape[:-1]), v_present),
    ]
    if cache is not None:
        scores_cache = torch.einsum("bhgrik,hsk->bhgris", q, codebook.to(q.dtype))
        columns.insert(0, (scores_cache, cache.count, cache.mean.to(dtype)))
    scores = torch.cat([score for score, _, _ in columns], dim=-1)
    multiplicity = torch.cat([n.expand(*k_prev.shape[:3], -1) for _, n, _ in columns], dim=-1)

    # 3. One phi_w over all columns, then the values they stand for.
    weights = attention_weights(scores, phi, multiplicity.unsqueeze(2)).to(dtype)
    parts = weights.split([score.shape[-1] for score, _, _ in columns], dim=-1)
    outputs = [
        torch.einsum("bhgrij,bhrjv->bhgriv", part, value)
        for part, (_, _, value) in zip(parts, columns, strict=True)
    ]
    return reduce(torch.add, outputs)


def _shift_in(window: Tensor, segment: Tensor, n_blocks: int, dim: int) -> Tensor:
    """The window, then all blocks of the segment but the last."""
    window = window.to(segment.dtype)
    if n_blocks == 1:
        return window
    kept = segment.narrow(dim, 0, segment.shape[dim] - window.shape[dim])
    return torch.cat([window, kept], dim=dim)


def _last(window: Tensor, segment: Tensor, dim: int) -> Tensor:
    """The newest tokens of window and segment together, as many as the window holds."""
    window_len, seq_len = window.shape[dim], segment.shape[dim]
    if seq_len >= window_len:
        # A copy: a view would keep the whole segment in memory for as long as the state lives.
        return segment.narrow(dim, seq_len - window_len, window_len).clone()
    kept = window.narrow(dim, seq_len, window_len - seq_len)
    return torch.cat([kept.to(segment.dtype), segment], dim=dim)
