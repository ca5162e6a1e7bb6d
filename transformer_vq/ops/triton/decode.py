"""Decode one token per row with one kernel per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_vq.ops.decode import Step, Token
from transformer_vq.ops.triton import code_kernels
from transformer_vq.ops.triton.launch import dot_constants, fit, launch, n_tiles, tiles_of


def attend_one_(token: Token, layer: int, step: Step) -> Tensor:
    """Return what `decode.attend_one_` returns, and write the same to the state."""
    state, evicted = step.state, step.evicted
    has_keys = state.k is not None
    run = _decode_token if torch.compiler.is_compiling() else decode_token_
    return run(
        token.code_scores,
        token.position_scores,
        token.q if has_keys else None,
        token.k_hat if has_keys else None,
        token.z,
        token.v,
        None if evicted is None else evicted[0][layer],
        None if evicted is None else evicted[1].mean[layer],
        state.values[layer],
        state.z[layer],
        None if state.k is None else state.k[layer],
        None if state.mean is None else state.mean[layer],
        step.log_count[layer],
        step.slot,
    )


def decode_token_(
    code_scores: Tensor,
    position_scores: Tensor | None,
    q: Tensor | None,
    k_new: Tensor | None,
    z_new: Tensor,
    v_new: Tensor,
    z_evicted: Tensor | None,
    mean_evicted: Tensor | None,
    values: Tensor,
    z: Tensor,
    k: Tensor | None,
    mean: Tensor | None,
    log_count: Tensor,
    slot: Tensor,
) -> Tensor:
    """Launch the kernel; shapes as in `Token`, `DecodeState` and `Step`."""
    b, h, n_group = code_scores.shape[:3]
    d_v, n_slots = v_new.shape[-1], z.shape[-1]
    n_code = values.shape[1] - n_slots
    d_k = 1 if q is None else q.shape[-1]
    bias = code_scores if position_scores is None else position_scores
    out = values.new_empty(b, h, n_group, d_v)
    sizes = {"rows": n_group, "columns": max(n_slots, n_code), "values": d_v}
    tiles = tiles_of("decode_token", values.dtype, **sizes)
    # Pointers that the kernel does not use if there is nothing to point to.
    optional = {"q": q, "k_new": k_new, "z_evicted": z_evicted, "mean_evicted": mean_evicted}
    launch(
        code_kernels.decode_token,
        (n_tiles(d_v, tiles.values), b * h),
        tiles,
        code_scores=code_scores,
        position_scores=bias,
        **{name: out if x is None else x.contiguous() for name, x in optional.items()},
        z_new=z_new.contiguous(),
        v_new=v_new.contiguous(),
        values=values,
        z=z,
        k=out if k is None else k,
        mean=out if mean is None else mean,
        log_count=log_count.contiguous(),
        slot=slot.contiguous(),
        out=out,
        n_group=n_group,
        n_head=h,
        d_v=d_v,
        **_strides("code", code_scores),
        **_strides("position", bias),
        L=n_slots - 1,
        S=n_code,
        DK=d_k,
        D=fit(d_k, 2**16),
        HAS_BIAS=position_scores is not None,
        HAS_KEYS=k is not None,
        HAS_MEAN=mean is not None,
        **dot_constants(values.dtype),
    )
    return out


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """Return where the scores of a row, head and group start. x: [b, h, g, columns]."""
    row, head, group, column = x.stride()
    assert column == 1
    return {f"{name}_row": row, f"{name}_head": head, f"{name}_group": group}


# torch.compile calls the launch as one operator, without looking into it.
_decode_token = torch.library.custom_op(
    "transformer_vq::decode_token", decode_token_, mutates_args=("values", "z", "k", "mean")
)


@_decode_token.register_fake
def _(code_scores: Tensor, *others: Tensor | None) -> Tensor:
    v_new, values = others[4], others[7]
    assert v_new is not None
    assert values is not None
    return values.new_empty(*code_scores.shape[:3], v_new.shape[-1])
