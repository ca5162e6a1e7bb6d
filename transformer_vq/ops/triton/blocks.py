"""Launch the kernels for segments and codes; shapes as in the kernels, B = b * h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_vq.ops.triton import attention_kernels, code_kernels
from transformer_vq.ops.triton.launch import dot_constants, fit, launch, n_tiles, tiles_of


@dataclass(frozen=True)
class Segment:
    """Everything that has no gradient.

    codebook: [h, s, k], count: [B, s] before the segment (s = 0 without a cache), codes:
    [B, r, L] of the previous blocks, counted: [b, r, i] of uint8, carry: [b, r] for documents,
    start: [b, t], before which a query attends to nothing. The cache before `start` is masked only
    with has_documents; without, its counts decide.
    """

    n_blocks: int
    n_query: int
    n_head: int
    codebook: Tensor
    count: Tensor
    codes: Tensor
    counted: Tensor
    carry: Tensor | None
    start: Tensor
    has_documents: bool
    grad_through_cache: bool

    @property
    def n_code(self) -> int:
        return self.count.shape[-1]

    @property
    def window_len(self) -> int:
        return self.codes.shape[-1]

    @property
    def values(self) -> dict[str, Any]:
        """What kernels need of it, by name; pointers that are not used point to anything."""
        return vars(self) | {
            "code": self.codebook,
            "z": self.codes,
            "carry": self.codes if self.carry is None else self.carry,
            "start_row": self.start.stride(0),
            "start_step": self.start.stride(1),
            "L": self.window_len,
            "S": self.n_code,
            "HAS_CARRY": self.carry is not None,
            "HAS_DOCUMENTS": self.has_documents,
        }


@dataclass(frozen=True)
class Prefix:
    """means: [B, r, s, v] before each block, counts: [B, r + 1, s], after: [B, s, v] mean."""

    means: Tensor
    counts: Tensor
    after: Tensor


def _launch_blocks(
    name: str,
    segment: Segment,
    q: Tensor,
    k_prev: Tensor,
    k: Tensor,
    by_distance: Tensor | None,
    counts: Tensor,
    **more: Any,
) -> None:
    """Launch a kernel with one program per tile of queries.

    q: [B, g, t, k], k_prev: [B, r, L, k], k: [B, r, i, k], by_distance: [B, g, t, L + 1].
    """
    n_query, n_columns = segment.n_query, max(segment.n_code, segment.window_len)
    tiles = tiles_of(name, q.dtype, rows=n_query, columns=n_columns)
    launch(
        getattr(attention_kernels, name),
        (n_tiles(n_query, tiles.rows), segment.n_blocks, q.shape[0] * q.shape[1]),
        tiles,
        **(segment.values | {"count": counts}),
        q=q,
        k_prev=k_prev,
        k=k,
        by_distance=q if by_distance is None else by_distance,
        n_group=q.shape[1],
        DK=q.shape[-1],
        D=fit(q.shape[-1], 2**16),
        HAS_BIAS=by_distance is not None,
        **dot_constants(q.dtype),
        **more,
    )


def block_lse(segment: Segment, q: Tensor, *keys: Any) -> Tensor:
    """Return the log of the softmax's sum, [B, g, t] in float32. keys: as in `_launch_blocks`."""
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32)
    _launch_blocks("block_lse", segment, q, *keys, lse=lse)
    return lse


def block_weights(segment: Segment, lse: Tensor, q: Tensor, *keys: Any) -> Tensor:
    """Return the weights, [B * r, g * i, s + L + i]. keys: as in `_launch_blocks`."""
    shape = (q.shape[0] * segment.n_blocks, q.shape[1] * segment.n_query)
    w = q.new_empty(*shape, segment.n_code + segment.window_len + segment.n_query)
    _launch_blocks("block_weights", segment, q, *keys, weights=w, lse=lse)
    return w


def flash_blocks(
    segment: Segment, values: tuple[Tensor, Tensor, Tensor], q: Tensor, *keys: Any
) -> tuple[Tensor, Tensor]:
    """Return the output, [B, g, t, v], and the log of the softmax's sum, in one kernel.

    values: those before each block, of its own and of the cache. keys: as in `_launch_blocks`.
    """
    v_prev, v, mean = values
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32)
    more: dict[str, Any] = {"v_prev": v_prev, "v": v, "mean": mean, "out": out, "lse": lse}
    more |= {"DV": v.shape[-1], "V": fit(v.shape[-1], 2**16)}
    _launch_blocks("flash_blocks", segment, q, *keys, **more)
    return out, lse


def softmax_backward_(
    segment: Segment, w: Tensor, d_w: Tensor, n_group: int, by_distance: Tensor | None
) -> Tensor | None:
    """Replace the gradient of the weights by that of the scores; return that of by_distance."""
    d_by_distance = None if by_distance is None else torch.empty_like(by_distance)
    tiles = tiles_of("softmax_backward", w.dtype, rows=segment.n_query, columns=w.shape[-1])
    n_heads = w.shape[0] // segment.n_blocks * n_group
    launch(
        attention_kernels.softmax_backward,
        (n_tiles(segment.n_query, tiles.rows), segment.n_blocks, n_heads),
        tiles,
        **segment.values,
        weights=w,
        d_weights=d_w,
        d_by_distance=w if d_by_distance is None else d_by_distance,
        n_group=n_group,
        HAS_BIAS=by_distance is not None,
    )
    return d_by_distance


def prefix(segment: Segment, v_prev: Tensor, mean: Tensor) -> Prefix:
    """Return the cache before each block. v_prev: [B, r, L, v], mean: [B, s, v]."""
    n_rows, n_code, d_v = mean.shape
    means = v_prev.new_empty(n_rows, segment.n_blocks, n_code, d_v)
    counts = segment.count.new_empty(n_rows, segment.n_blocks + 1, n_code)
    after = torch.empty_like(mean)
    sizes = {"rows": n_code, "columns": segment.n_query, "values": d_v}
    tiles = tiles_of("cache_prefix", v_prev.dtype, **sizes)
    launch(
        code_kernels.cache_prefix,
        (n_tiles(d_v, tiles.values), n_tiles(n_code, tiles.rows), n_rows),
        tiles,
        **segment.values,
        v=v_prev,
        mean=mean,
        means=means,
        counts=counts,
        mean_after=after,
        d_v=d_v,
        **dot_constants(v_prev.dtype, exact=True),
    )
    return Prefix(means, counts, after)


def prefix_gradient(
    segment: Segment, d_means: Tensor, counts: Tensor, d_after: Tensor | None, d_v_prev: Tensor
) -> Tensor:
    """Add the gradient of evicted values to d_v_prev; return that of the mean before the segment.

    d_means: [B, r, s, v], d_after: [B, s, v] -> [B, s, v].
    """
    n_rows, n_blocks, n_code, d_v = d_means.shape
    sums = torch.empty_like(d_means, dtype=torch.float32)
    d_mean = sums.new_empty(n_rows, n_code, d_v)
    tiles = tiles_of("cache_suffix", d_means.dtype, rows=n_code, values=d_v)
    launch(
        code_kernels.cache_suffix,
        (n_tiles(d_v, tiles.values), n_tiles(n_code, tiles.rows), n_rows),
        tiles,
        **segment.values,
        d_means=d_means,
        counts=counts,
        d_after=d_means if d_after is None else d_after.contiguous(),
        sums=sums,
        d_mean=d_mean,
        d_v=d_v,
        HAS_AFTER=d_after is not None,
    )
    tiles = tiles_of("evicted_gradient", d_v_prev.dtype, rows=segment.n_query, values=d_v)
    launch(
        code_kernels.evicted_gradient,
        (n_tiles(d_v, tiles.values), n_tiles(segment.n_query, tiles.rows), n_rows * n_blocks),
        tiles,
        **segment.values,
        sums=sums,
        d_v_prev=d_v_prev,
        d_v=d_v,
    )
    return d_mean


def nearest_code(k: Tensor, codebook: Tensor) -> Tensor:
    """Return `nn.quantizer.nearest_code`, in float32. k: [b, h, t, k], codebook: [h, s, k]."""
    k, codebook = k.float().contiguous(), codebook.float().contiguous()
    (b, h, t, d_k), n_code = k.shape, codebook.shape[1]
    z = torch.empty(b, h, t, dtype=torch.int64, device=k.device)
    tiles = tiles_of("nearest_code", k.dtype, rows=t, columns=n_code)
    launch(
        code_kernels.nearest_code,
        (n_tiles(t, tiles.rows), b * h),
        tiles,
        k=k,
        code=codebook,
        half_norm=codebook.square().sum(-1) / 2,
        z=z,
        seq_len=t,
        n_head=h,
        S=n_code,
        DK=d_k,
        D=fit(d_k, 2**16),
        **dot_constants(k.dtype, exact=True),
    )
    return z
