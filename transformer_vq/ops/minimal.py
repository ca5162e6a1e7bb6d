"""Theorem 3.7 on one page: dense softmax attention over quantized keys in linear time.

Read this file first. Everything else in `ops` computes the same function, faster or with more
options, and is tested to be equal to it.

A block of L queries attends to three sets of keys under one softmax: the cache (everything older
than the window, held as one mean value and one count per code), the window (the L tokens before the
block) and the block itself. Keys that share a code have the same score, so a code with n tokens and
mean value m contributes exactly what those tokens would: n exp(score) to the normalizer and
n exp(score) m to the output. That is why the cache loses nothing, whatever its size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops.cache import CacheStats, merge
from transformer_vq.ops.state import VQState


def minimal_vq_attention(
    q: Tensor,
    k_hat: Tensor,
    z: Tensor,
    v: Tensor,
    codebook: Tensor,
    by_distance: Tensor,
    state: VQState,
) -> tuple[Tensor, VQState]:
    """Return W V of Definition 3.1 for the next tokens of a sequence, and the state after them.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] positional scores for distances L, ..., 0 -> [b, h, g, t, v].
    """
    k_window, v_window, z_window, position = state.k, state.v, state.z, state.position
    cache = state.cache
    assert cache is not None
    n_code, window_len = codebook.shape[-2], k_window.shape[-2]
    outputs = []
    for start in range(0, q.shape[-2], window_len):
        block = slice(start, start + window_len)
        q_block, bias = q[..., block, :], by_distance[..., block, :]
        n = q_block.shape[-2]

        # 1. The keys and values that the block sees one by one: the window, then its own.
        k_local = torch.cat([k_window, k_hat[..., block, :]], dim=-2)
        v_local = torch.cat([v_window, v[..., block, :]], dim=-2)
        z_local = torch.cat([z_window, z[..., block]], dim=-1)

        # 2. Their scores: content, plus the positional bias, which is zero beyond distance L.
        j = torch.arange(window_len + n, device=q.device)
        distance = j[window_len:, None] - j  # [i, j]
        column = (window_len - distance).clamp(0, window_len).expand(*bias.shape[:3], -1, -1)
        local_bias = bias.gather(-1, column).masked_fill(distance > window_len, 0.0)
        scores_local = torch.einsum("bhgik,bhjk->bhgij", q_block, k_local) + local_bias
        is_empty = j < window_len - position.view(-1, 1, 1, 1, 1)  # slots never filled
        scores_local = scores_local.masked_fill((distance < 0) | is_empty, -torch.inf)

        # 3. The scores of the codes: a code with n tokens counts n times, an empty one not at all.
        log_count = cache.count.to(q.dtype).log()[:, :, None, None]  # log 0 = -inf
        scores_cache = torch.einsum("bhgik,hsk->bhgis", q_block, codebook) + log_count

        # 4. One softmax over codes and local keys, then the weighted sum of their values.
        weights = torch.cat([scores_cache, scores_local], dim=-1).softmax(dim=-1)
        of_codes = torch.einsum("bhgis,bhsv->bhgiv", weights[..., :n_code], cache.mean)
        of_keys = torch.einsum("bhgij,bhjv->bhgiv", weights[..., n_code:], v_local)
        outputs.append(of_codes + of_keys)

        # 5. The n oldest slots leave the window; those that hold a token are merged into the cache.
        holds_token = ~is_empty[:, 0, 0, 0, :n].unsqueeze(1)  # [b, 1, n]
        one_hot = F.one_hot(z_local[..., :n], n_code) * holds_token.unsqueeze(-1)  # Delta
        count = one_hot.sum(-2)
        total = torch.einsum("bhjs,bhjv->bhsv", one_hot.to(v.dtype), v_local[..., :n, :])
        evicted = CacheStats(total / count.clamp(min=1).unsqueeze(-1), count)
        cache = merge(cache, evicted)
        k_window, v_window, z_window = k_local[..., n:, :], v_local[..., n:, :], z_local[..., n:]
        position = position + n
    after = replace(state, k=k_window, v=v_window, z=z_window, position=position, cache=cache)
    return torch.cat(outputs, dim=-2), after
