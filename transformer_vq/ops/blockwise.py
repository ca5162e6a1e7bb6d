"""Causal attention in linear time (Theorems 3.6 and 3.7, Code 1): state in, state out.

A segment of any length is cut into blocks of L tokens, starting at its first token. A block attends
to the cache (all tokens before the window), to the window (the L tokens before the block), and to
itself, under one softmax. The local bias is zero beyond distance L and the cache is lossless, so
the result does not depend on where a sequence is cut into segments.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from transformer_vq.errors import UserError
from transformer_vq.ops import packing as pack
from transformer_vq.ops.cache import CacheStats, accumulation_dtype, block_stats
from transformer_vq.ops.fused import attend_blocks
from transformer_vq.ops.packing import AttentionInputs, Eviction, Packing, shift_in
from transformer_vq.ops.position import local_bias
from transformer_vq.ops.quadratic import Phi, attention_weights
from transformer_vq.ops.reductions import check_method, exclusive_prefix
from transformer_vq.ops.runtime import check_shapes, execution_on
from transformer_vq.ops.state import VQState
from transformer_vq.ops.triton import check_device


def vq_attention(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor | None = None,
    state: VQState | None = None,
    *,
    block_len: int = 512,
    packing: Packing | None = None,
    reduction: str = "auto",
    backend: str = "auto",
    phi: Phi | None = None,
    grad_through_cache: bool = True,
) -> tuple[Tensor, VQState]:
    """Return W V of Definition 3.1 for the next segment of a sequence, and the state after it.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] -> [b, h, g, t, v]. k_hat must be codebook[z]. Scores are
    q . k_hat: divide by sqrt(k) beforehand.

    by_distance: positional scores for distances L, ..., 0, added within that range; None for none.
    state: the state after the previous segment; None starts new sequences, with a window of
    L = block_len tokens if by_distance does not determine it. A state without a cache limits
    attention to the last L tokens.
    packing: padding and documents, in the order of `Packing.gather`.
    reduction: "serial", "matmul" or "associative" across blocks, or "input_scan" for one block at a
    time. "auto" is the fast implementation in `fused`; while torch.compile traces, and with
    phi, it is "serial" instead. Results agree up to rounding.
    backend: "eager", or "triton" for the GPU kernels in `ops/triton` (extra `triton`). "auto" is
    "eager" on all devices.
    phi: element-wise nonlinearity instead of the softmax (Theorem 3.6).
    """
    inputs = AttentionInputs(q, k_hat, z, v, codebook, by_distance, packing)
    if state is None:
        window_len = block_len if by_distance is None else by_distance.shape[-1] - 1
        sizes = (*z.shape[:2], window_len, q.shape[-1], v.shape[-1], codebook.shape[-2])
        state = VQState.empty(*sizes, dtype=v.dtype, device=v.device)
    check_method(reduction, backend)
    _check_inputs(inputs, state)
    window_len = state.k.shape[-2]
    max_len = window_len if reduction == "input_scan" else inputs.seq_len
    outputs: list[Tensor] = []
    for segment in inputs.split(pack.segment_lens(inputs.seq_len, window_len, max_len)):
        output, state = attend_segment(segment, state, reduction, backend, grad_through_cache, phi)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state


def attend_segment(
    inputs: AttentionInputs,
    state: VQState,
    reduction: str,
    backend: str,
    grad_through_cache: bool,
    phi: Phi | None = None,
) -> tuple[Tensor, VQState]:
    """Compute `vq_attention` for whole blocks, or for a single shorter one; nothing is checked."""
    n_blocks = max(1, inputs.seq_len // state.k.shape[-2])
    evicted = pack.find_evictions(state, inputs.packing, inputs.seq_len, n_blocks)
    # The fused implementation is an autograd function, with a softmax, for eager mode. A compiler
    # traces the plain operations instead, and fuses them itself.
    if reduction == "auto" and (phi is not None or torch.compiler.is_compiling()):
        reduction = "serial"
    if backend == "triton":
        check_device(inputs.q.device)
        if phi is not None:
            raise UserError("backend='triton' has no phi, only the softmax; use backend='eager'")
        from transformer_vq.ops.triton.attention import attend_blocks as attend_triton

        output, cache = attend_triton(inputs, state, evicted, grad_through_cache)
    elif reduction == "auto":
        tile_queries = execution_on(inputs.q.device).tile_queries
        output, cache = attend_blocks(inputs, state, evicted, grad_through_cache, tile_queries)
    else:
        output, cache = _plain_blocks(inputs, state, evicted, grad_through_cache, reduction, phi)
    if cache is not None and evicted.kept is not None:
        cache = CacheStats(cache.mean, cache.count * evicted.kept.view(-1, 1, 1))
    # The state after the segment: its newest tokens in the window, and the new cache.
    window_len, packing = state.k.shape[-2], inputs.packing
    length = None if packing is None else packing.length
    after = replace(
        state,
        k=pack.newest(state.k, inputs.k_hat, window_len, length, dim=-2),
        v=pack.newest(state.v, inputs.v, window_len, length, dim=-2),
        z=pack.newest(state.z, inputs.z, window_len, length, dim=-1),
        position=pack.next_position(state.position, inputs.seq_len, packing),
        cache=cache,
    )
    return output, after


def _check_inputs(inputs: AttentionInputs, state: VQState) -> None:
    """Raise ValueError if the shapes do not fit each other or the state."""
    shapes = {
        "q": (inputs.q, "bhgtk"),
        "k_hat": (inputs.k_hat, "bhtk"),
        "z": (inputs.z, "bht"),
        "v": (inputs.v, "bhtv"),
        "codebook": (inputs.codebook, "hsk"),
        "state_keys": (state.k, "bhLk"),
        "state_values": (state.v, "bhLv"),
    }
    if inputs.by_distance is not None:
        shapes["by_distance"] = (inputs.by_distance, "bhgtd")
    check_shapes(**shapes)
    n, bias = state.k.shape[-2], inputs.by_distance
    if bias is not None and bias.shape[-1] != n + 1:
        want = f"want {n + 1}: {n}, ..., 0 for the window of the state"
        raise ValueError(f"by_distance has {bias.shape[-1]} distances, {want}")


def _plain_blocks(
    inputs: AttentionInputs,
    state: VQState,
    evicted: Eviction,
    grad_through_cache: bool,
    reduction: str,
    phi: Phi | None,
) -> tuple[Tensor, CacheStats | None]:
    """Attend from all blocks at once, by differentiable operations; also return the cache after."""
    seq_len, window_len = inputs.seq_len, state.k.shape[-2]
    _, n_blocks, n_query = evicted.counted.shape

    # The block before block r is block r - 1; the one before the first block is the window.
    k_prev = shift_in(state.k, inputs.k_hat, n_blocks, dim=-2)
    v_prev = shift_in(state.v, inputs.v, n_blocks, dim=-2)
    z_prev = shift_in(state.z, inputs.z, n_blocks, dim=-1)
    later = state.window_valid.new_ones(inputs.q.shape[0], (n_blocks - 1) * window_len)
    valid_prev = torch.cat([state.window_valid, later], dim=-1)  # [b, r * j]

    # Tokens are evicted to the cache after the block that follows theirs.
    prefix, cache = None, state.cache
    if cache is not None:
        v_evicted = v_prev[..., :seq_len, :].unflatten(-2, (n_blocks, n_query))
        blocks = block_stats(
            z_prev[..., :seq_len].unflatten(-1, (n_blocks, n_query)),
            v_evicted if grad_through_cache else v_evicted.detach(),
            inputs.codebook.shape[-2],
            evicted.counted.unsqueeze(1),
        )
        if evicted.carry is not None:
            blocks = replace(blocks, carry=evicted.carry.unsqueeze(1))
        initial = cache if grad_through_cache else cache.detach()
        prefix, cache = exclusive_prefix(blocks, initial, reduction)

    output = _attend_plain(
        inputs.blocked(n_blocks),
        k_prev.unflatten(-2, (n_blocks, window_len)),
        v_prev.unflatten(-2, (n_blocks, window_len)),
        valid_prev.unflatten(-1, (n_blocks, window_len)).unsqueeze(1),
        prefix,
        phi,
    )
    return output.flatten(-3, -2), cache


def _attend_plain(
    inputs: AttentionInputs,
    k_prev: Tensor,
    v_prev: Tensor,
    valid_prev: Tensor,
    cache: CacheStats | None,
    phi: Phi | None,
) -> Tensor:
    """Attend from blocks of queries to their cache, previous block and own block.

    inputs: `blocked`, k_prev: [b, h, r, j, k], v_prev: [b, h, r, j, v], valid_prev: [b, 1, r, j],
    cache.mean: [b, h, r, s, v] -> [b, h, g, r, i, v].
    """
    q, k_present, v_present = inputs.q, inputs.k_hat, inputs.v
    window_len, dtype = k_prev.shape[-2], v_present.dtype

    # 1. Scores of the local keys: content, plus a local bias that includes the causal mask.
    by_distance = inputs.by_distance
    if by_distance is None:
        by_distance = q.new_zeros(()).expand(*q.shape[:-1], window_len + 1)
    bias = local_bias(by_distance, older=0.0 if cache is not None else -torch.inf)
    sees_cache = None
    if inputs.packing is not None:
        visible, sees_cache = pack.visible_keys(inputs.packing, window_len, n_blocks=q.shape[3])
        bias = bias.masked_fill(~visible[:, None, None], -torch.inf)
    scores_prev = torch.einsum("bhgrik,bhrjk->bhgrij", q, k_prev) + bias[..., :window_len]
    scores_present = torch.einsum("bhgrik,bhrjk->bhgrij", q, k_present) + bias[..., window_len:]

    # 2. The number of keys behind each column of scores: 0 for an empty slot of the window, and
    #    the count of tokens for a code of the cache.
    one = torch.ones((), dtype=accumulation_dtype(dtype), device=q.device)
    columns = [
        (scores_prev, valid_prev * one, v_prev),
        (scores_present, one.expand(*k_present.shape[:-1]), v_present),
    ]
    if cache is not None:
        scores_cache = torch.einsum("bhgrik,hsk->bhgris", q, inputs.codebook.to(q.dtype))
        if sees_cache is not None:
            masked = ~sees_cache[:, None, None, ..., None]
            scores_cache = scores_cache.masked_fill(masked, -torch.inf)
        columns.insert(0, (scores_cache, cache.count, cache.mean.to(dtype)))
    scores = torch.cat([score for score, _, _ in columns], dim=-1)
    multiplicity = torch.cat([n.expand(*k_prev.shape[:3], -1) for _, n, _ in columns], dim=-1)

    # 3. One phi_w over all columns, then the weighted values.
    weights = attention_weights(scores, phi, multiplicity.unsqueeze(2)).to(dtype)
    parts = weights.split([score.shape[-1] for score, _, _ in columns], dim=-1)
    outputs = [
        torch.einsum("bhgrij,bhrjv->bhgriv", part, value)
        for part, (_, _, value) in zip(parts, columns, strict=True)
    ]
    return reduce(torch.add, outputs)


def encoder_attention(
    q: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    *,
    phi: Phi | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Attend from every query to every key, with element-wise phi (Theorem 3.4) or softmax (3.5).

    Without mask and bias, all keys with the same code have the same weight. So a query only scores
    the S codewords, weighted by the count and mean value of each (`block_stats`).

    q: [b, h, g, i, k], z: [b, h, j], v: [b, h, j, v], codebook: [h, s, k], valid: [b, j]
    -> [b, h, g, i, v].
    """
    check_shapes(q=(q, "bhgik"), z=(z, "bhj"), v=(v, "bhjv"), codebook=(codebook, "hsk"))
    stats = block_stats(z, v, codebook.shape[-2], None if valid is None else valid[:, None])
    scores = torch.einsum("bhgik,hsk->bhgis", q, codebook)
    weights = attention_weights(scores, phi, stats.count.unsqueeze(2)).to(v.dtype)
    return torch.einsum("bhgis,bhsv->bhgiv", weights, stats.mean.to(v.dtype))
