"""Causal attention in linear time (Theorems 3.6 and 3.7, Code 1): state in, state out.

A segment of any length is cut into blocks of L tokens, counted from its own start. A block attends
to the cache (everything older than L tokens before it), to the L tokens before it, and to itself,
under one softmax. The local bias vanishes beyond distance L and the cache is lossless, so where a
sequence is cut into segments does not change the result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from transformer_vq.ops import fused
from transformer_vq.ops.cache import CacheStats, accumulation_dtype, block_stats
from transformer_vq.ops.position import local_bias
from transformer_vq.ops.quadratic import Phi, attention_weights
from transformer_vq.ops.ragged import (
    Eviction,
    Packing,
    Visibility,
    find_evictions,
    newest,
    next_position,
    visible_keys,
)
from transformer_vq.ops.reductions import exclusive_prefix
from transformer_vq.ops.shapes import check_shapes
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
    layout: Packing | None = None,
    reduction: str = "auto",
    phi: Phi | None = None,
    grad_through_cache: bool = True,
) -> tuple[Tensor, AttentionState]:
    """W V of Definition 3.1 for the next segment of a sequence, and the state after it.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] positional scores for distances L, ..., 0
    -> [b, h, g, t, v]. A state without a cache gives attention to the last L tokens only.
    layout: padding and documents, in the order of `Packing.gather`.
    reduction: "serial", "matmul", "associative", "input_scan" for one block at a time, or "auto"
    for the fast form of `fused`, which torch.compile does not see into.
    """
    check_shapes(
        q=(q, "bhgtk"),
        k_hat=(k_hat, "bhtk"),
        z=(z, "bht"),
        v=(v, "bhtv"),
        codebook=(codebook, "hsk"),
        by_distance=(by_distance, "bhgtd"),
        state_keys=(state.k, "bhLk"),
        state_values=(state.v, "bhLv"),
    )
    seq_len, block_len = q.shape[-2], state.k.shape[-2]
    if by_distance.shape[-1] != block_len + 1:
        raise ValueError(
            f"by_distance has {by_distance.shape[-1]} distances, want {block_len + 1}: "
            f"{block_len}, ..., 0 for the window of the state"
        )
    whole, rest = seq_len - seq_len % block_len, seq_len % block_len
    sizes = [block_len] * (whole // block_len) if reduction == "input_scan" else [whole]
    sizes = [size for size in (*sizes, rest) if size > 0]
    outputs: list[Tensor] = []
    start = 0
    for part in zip(
        _split(q, sizes, dim=-2),
        _split(k_hat, sizes, dim=-2),
        _split(z, sizes, dim=-1),
        _split(v, sizes, dim=-2),
        _split(by_distance, sizes, dim=-2),
        strict=True,
    ):
        stop = start + part[0].shape[-2]
        output, state = _attend_blocks(
            *part,
            codebook,
            state,
            layout=None if layout is None else layout.part(start, stop),
            reduction=reduction,
            phi=phi,
            grad_through_cache=grad_through_cache,
        )
        outputs.append(output)
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state


def _split(x: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
    """Parts whose gradients are put together once: that of a slice is as large as the whole."""
    return (x,) if len(sizes) == 1 else x.split(sizes, dim)


def _attend_blocks(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    by_distance: Tensor,
    codebook: Tensor,
    state: AttentionState,
    *,
    layout: Packing | None,
    reduction: str,
    phi: Phi | None,
    grad_through_cache: bool,
) -> tuple[Tensor, AttentionState]:
    """The same for whole blocks, or for one block that is shorter than L."""
    assert state.z is not None
    seq_len, window_len = q.shape[-2], state.k.shape[-2]
    n_blocks = max(1, seq_len // window_len)
    leaving = sight = None
    if layout is not None:
        leaving = find_evictions(layout, state.position, window_len, n_blocks)
        sight = visible_keys(layout, window_len, n_blocks)
    inputs = (q, k_hat, z, v, by_distance, codebook, state, leaving, sight, grad_through_cache)
    if reduction == "auto" and phi is None and not torch.compiler.is_compiling():
        output, cache = fused.attend_blocks(*inputs)
    else:
        output, cache = _plain_blocks(*inputs, reduction, phi)
    length = None if layout is None else layout.length
    after = replace(
        state,
        k=newest(state.k, k_hat, window_len, length, dim=-2),
        v=newest(state.v, v, window_len, length, dim=-2),
        z=newest(state.z, z, window_len, length, dim=-1),
        position=next_position(state.position, seq_len, layout),
        cache=cache,
    )
    return output, after


def _plain_blocks(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    by_distance: Tensor,
    codebook: Tensor,
    state: AttentionState,
    leaving: Eviction | None,
    sight: Visibility | None,
    grad_through_cache: bool,
    reduction: str,
    phi: Phi | None,
) -> tuple[Tensor, CacheStats | None]:
    """All blocks at once, in operations that differentiate themselves; and the cache after them."""
    assert state.z is not None
    seq_len, window_len = q.shape[-2], state.k.shape[-2]
    n_query = min(seq_len, window_len)
    n_blocks = seq_len // n_query

    # Before block r stands block r - 1, before the first one the window.
    k_prev = _shift_in(state.k, k_hat, n_blocks, dim=-2)
    v_prev = _shift_in(state.v, v, n_blocks, dim=-2)
    z_prev = _shift_in(state.z, z, n_blocks, dim=-1)
    later = state.window_valid.new_ones(q.shape[0], (n_blocks - 1) * window_len)
    valid_prev = torch.cat([state.window_valid, later], dim=-1)  # [b, r * j]

    # Tokens leave the window for the cache when the block after theirs is done.
    prefix, cache = None, state.cache
    if cache is not None:
        counted = valid_prev[:, :seq_len].unflatten(-1, (n_blocks, n_query))
        if leaving is not None:
            counted = leaving.counted
        v_leaving = v_prev[..., :seq_len, :].unflatten(-2, (n_blocks, n_query))
        blocks = block_stats(
            z_prev[..., :seq_len].unflatten(-1, (n_blocks, n_query)),
            v_leaving if grad_through_cache else v_leaving.detach(),
            codebook.shape[-2],
            counted.unsqueeze(1),
        )
        if leaving is not None:
            blocks = replace(blocks, carry=leaving.carry.to(torch.int64).unsqueeze(1))
        initial = cache if grad_through_cache else cache.detach()
        prefix, cache = exclusive_prefix(blocks, initial, reduction)
        if leaving is not None:
            cache = CacheStats(cache.mean, cache.count * leaving.goes_on.view(-1, 1, 1))

    output = _weigh(
        q.unflatten(-2, (n_blocks, n_query)),
        k_prev.unflatten(-2, (n_blocks, window_len)),
        v_prev.unflatten(-2, (n_blocks, window_len)),
        valid_prev.unflatten(-1, (n_blocks, window_len)).unsqueeze(1),
        k_hat.unflatten(-2, (n_blocks, n_query)),
        v.unflatten(-2, (n_blocks, n_query)),
        codebook,
        prefix,
        by_distance.unflatten(-2, (n_blocks, n_query)),
        sight,
        phi,
    )
    return output.flatten(-3, -2), cache


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
    sight: Visibility | None,
    phi: Phi | None,
) -> Tensor:
    """Attention of blocks of queries to their cache, previous block and own block.

    q: [b, h, g, r, i, k], k_*: [b, h, r, j, k], v_*: [b, h, r, j, v], valid_prev: [b, 1, r, j],
    cache.mean: [b, h, r, s, v], by_distance: [b, h, g, r, i, L + 1] -> [b, h, g, r, i, v].
    """
    window_len, dtype = k_prev.shape[-2], v_present.dtype

    # 1. Scores of the keys in sight: content, and a local bias that also holds the causal mask.
    bias = local_bias(by_distance, older=0.0 if cache is not None else -torch.inf)
    if sight is not None:
        bias = bias.masked_fill(~sight.local[:, None, None], -torch.inf)
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
        if sight is not None:
            hidden = ~sight.cache[:, None, None, ..., None]
            scores_cache = scores_cache.masked_fill(hidden, -torch.inf)
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
