"""Blockwise attention with Triton kernels: the implementation behind `backend="triton"`.

The mathematics is that of `fused`, for all blocks of a segment at once. Kernels compute the cache
before each block, the weights and the gradient of the scores; products with values and keys are
batched matrix products of PyTorch. Values that are as narrow as keys take one kernel instead.

For the backward pass only the inputs and one number per query are kept, the log of the softmax's
sum. Weights and cache are computed again from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_vq.errors import UserError
from transformer_vq.ops.cache import CacheStats
from transformer_vq.ops.fused import apply_by_head
from transformer_vq.ops.packing import AttentionInputs, Eviction, shift_in
from transformer_vq.ops.runtime import full_precision
from transformer_vq.ops.state import VQState
from transformer_vq.ops.triton.blocks import (
    Prefix,
    Segment,
    block_lse,
    block_weights,
    flash_blocks,
    prefix,
    prefix_gradient,
    softmax_backward_,
)
from transformer_vq.ops.triton.launch import DTYPES

MAX_FLASH = 128  # widest values for one kernel: its output stays in registers


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_blocks(
    inputs: AttentionInputs, state: VQState, evicted: Eviction, grad_through_cache: bool
) -> tuple[Tensor, CacheStats | None]:
    """Attend from whole blocks, or from one shorter block; also return the cache after them.

    Equal to `fused.attend_blocks` up to rounding, in float32, bfloat16 and float16.
    """
    v = inputs.v
    if v.dtype not in DTYPES:
        raise UserError(f"backend='triton' has no kernels for {v.dtype}; use float32 or bfloat16")
    (b, h, _, seq_len, _), packing = inputs.q.shape, inputs.packing
    _, n_blocks, n_query = evicted.counted.shape
    blocks = (n_blocks, state.k.shape[-2])
    start = (-state.position).unsqueeze(-1).expand(b, seq_len)
    count = inputs.z.new_zeros(b * h, 0)
    if state.cache is not None:
        count = state.cache.count.flatten(0, 1).contiguous()
    z_prev = shift_in(state.z, inputs.z, n_blocks, dim=-1)
    segment = Segment(
        n_blocks=n_blocks,
        n_query=n_query,
        n_head=h,
        codebook=inputs.codebook.detach().to(v.dtype).contiguous(),
        count=count,
        codes=z_prev.flatten(0, 1).unflatten(-1, blocks).contiguous(),
        counted=evicted.counted.to(torch.uint8).contiguous(),
        carry=None if evicted.carry is None else evicted.carry.contiguous(),
        start=start if packing is None else packing.doc_start.contiguous(),
        has_documents=packing is not None,
        grad_through_cache=grad_through_cache and state.cache is not None,
    )
    return apply_by_head(_Attention, inputs, state, segment)


class _Attention(torch.autograd.Function):
    """q: [B, g, t, k], k: [B, t, k], v: [B, t, v], by_distance: [B, g, t, L + 1], k_window:
    [B, L, k], v_window: [B, L, v], mean: [B, s, v] -> [B, g, t, v], mean and count after."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        by_distance: Tensor | None,
        k_window: Tensor,
        v_window: Tensor,
        mean: Tensor | None,
        segment: Segment,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.segment = segment
        # Kernels need contiguous tensors.
        q, k, v, k_window, v_window = (x.contiguous() for x in (q, k, v, k_window, v_window))
        by_distance = None if by_distance is None else by_distance.contiguous()
        mean = None if mean is None else mean.contiguous()
        k_prev, v_prev = _previous(k_window, k, segment), _previous(v_window, v, segment)
        before = None if mean is None else prefix(segment, v_prev, mean)
        counts = segment.count if before is None else before.counts
        scored = (q, k_prev, k, by_distance, counts)
        if v.shape[-1] == q.shape[-1] <= MAX_FLASH:
            values = (v_prev, v, v if before is None else before.means)
            out, lse = flash_blocks(segment, values, *scored)
        else:
            lse = block_lse(segment, *scored)
            w = block_weights(segment, lse, *scored)
            out = _from_blocks(_weighted_values(w, segment, v_prev, v, before), segment)
        ctx.save_for_backward(q, k, v, by_distance, k_window, v_window, mean, lse)
        count = segment.count if before is None else before.counts[:, -1].contiguous()
        ctx.mark_non_differentiable(count)
        return out, None if before is None else before.after, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor, d_after: Tensor | None, d_count: None
    ) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        q, k, v, by_distance, k_window, v_window, mean, lse = ctx.saved_tensors
        k_prev, v_prev = _previous(k_window, k, segment), _previous(v_window, v, segment)
        before = None if mean is None else prefix(segment, v_prev, mean)
        counts = segment.count if before is None else before.counts
        w = block_weights(segment, lse, q, k_prev, k, by_distance, counts)
        d_o, q_rows = _to_blocks(d_out, segment), _to_blocks(q, segment)
        keys = (_flat(k_prev, segment), _flat(k, segment))
        values = (_flat(v_prev, segment), _flat(v, segment))
        w_cache, w_prev, w_own = _parts(w, segment)
        with full_precision(q.device):
            d_v_prev, d_v = torch.bmm(w_prev.mT, d_o), torch.bmm(w_own.mT, d_o)
            d_mean = None
            if segment.grad_through_cache:
                d_means = torch.bmm(w_cache.mT, d_o).unflatten(0, (-1, segment.n_blocks))
                d_mean = prefix_gradient(segment, d_means, counts, d_after, d_v_prev)
                del d_means
            d_s = torch.empty_like(w)
            d_cache, d_prev, d_own = _parts(d_s, segment)
            d_prev.copy_(torch.bmm(d_o, values[0].mT))
            d_own.copy_(torch.bmm(d_o, values[1].mT))
            if before is not None:
                d_cache.copy_(torch.bmm(d_o, before.means.flatten(0, 1).mT))
            d_by_distance = softmax_backward_(segment, w, d_s, q.shape[1], by_distance)
            del w, w_cache, w_prev, w_own
            d_q = torch.bmm(d_prev, keys[0]).baddbmm_(d_own, keys[1])
            if before is not None:
                n_repeats = d_q.shape[0] // segment.n_blocks // segment.n_head
                code = segment.codebook.repeat_interleave(segment.n_blocks, 0)
                d_q.baddbmm_(d_cache, code.repeat(n_repeats, 1, 1))
            d_k_prev, d_k = torch.bmm(d_prev.mT, q_rows), torch.bmm(d_own.mT, q_rows)
        d_k, d_k_window = _gradients(d_k_prev, d_k.view_as(k), k_window)
        d_v, d_v_window = _gradients(d_v_prev, d_v.view_as(v), v_window)
        d_q = _from_blocks(d_q, segment)
        return d_q, d_k, d_v, d_by_distance, d_k_window, d_v_window, d_mean, None


def _previous(window: Tensor, x: Tensor, segment: Segment) -> Tensor:
    """Return the block before each block. window: [B, L, x], x: [B, t, x] -> [B, r, L, x]."""
    before = shift_in(window, x, segment.n_blocks, dim=1)
    return before.contiguous().view(len(x), segment.n_blocks, -1, x.shape[-1])


def _gradients(d_previous: Tensor, d_x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the window; d_x has only that of the blocks themselves."""
    d_before = d_previous.view(len(window), -1, window.shape[-1])
    n = window.shape[1]
    d_x[:, : d_before.shape[1] - n] += d_before[:, n:]
    return d_x, d_before[:, :n]


def _weighted_values(
    w: Tensor, segment: Segment, v_prev: Tensor, v: Tensor, before: Prefix | None
) -> Tensor:
    """Return the weights times the values of cache, previous and own block: [B * r, g * i, v]."""
    w_cache, w_prev, w_own = _parts(w, segment)
    with full_precision(w.device):
        out = torch.bmm(w_own, _flat(v, segment)).baddbmm_(w_prev, _flat(v_prev, segment))
        if before is not None:
            out.baddbmm_(w_cache, before.means.flatten(0, 1))
    return out


def _parts(w: Tensor, segment: Segment) -> tuple[Tensor, ...]:
    """Return the columns of the cache, the previous block and the block itself."""
    sizes = [segment.n_code, segment.window_len, segment.n_query]
    parts: tuple[Tensor, ...] = w.split(sizes, dim=-1)
    return parts


def _flat(x: Tensor, segment: Segment) -> Tensor:
    """[B, r * j, x] or [B, r, j, x] -> [B * r, j, x]"""
    return x.view(x.shape[0] * segment.n_blocks, -1, x.shape[-1])


def _to_blocks(x: Tensor, segment: Segment) -> Tensor:
    """[B, g, t, x] -> [B * r, g * i, x]"""
    blocks = x.unflatten(2, (segment.n_blocks, segment.n_query)).transpose(1, 2)
    rows: Tensor = blocks.reshape(x.shape[0] * segment.n_blocks, -1, x.shape[-1])
    return rows


def _from_blocks(x: Tensor, segment: Segment) -> Tensor:
    """[B * r, g * i, x] -> [B, g, t, x]"""
    n_group = x.shape[1] // segment.n_query
    blocks = x.view(-1, segment.n_blocks, n_group, segment.n_query, x.shape[2])
    return blocks.transpose(1, 2).flatten(2, 3)
