"""What attention with and without quantized keys have in common: projections, heads, checks.

One layout serves all head types: h key/value heads with g query heads each. SHGA has h = g = 1,
wide values and a gate; MQA has h = 1; MHA has g = 1; GQA has any h and g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.config import AttentionConfig, Heads
from transformer_vq.nn.layers import gated, linear, rms_norm, run
from transformer_vq.nn.quantizer import CodeUsage
from transformer_vq.ops.position import relative_sinusoids, scores_by_distance
from transformer_vq.ops.ragged import Packing, read_packing
from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class AttentionOutput:
    """y: [b, t, d_model] the residual branch, state: after this segment; usage is None if full."""

    y: Tensor
    state: AttentionState
    commit_loss: Tensor
    code_usage: CodeUsage | None


class Attention(nn.Module):
    """Projections in and out, and the surface; how to attend is left to the subclass."""

    def __init__(self, config: AttentionConfig, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.set_heads(config.heads)
        d_model, n_head, n_kv_head = config.d_model, config.heads.n_head, config.heads.n_kv_head
        self.q_proj = linear(d_model, n_head * self.d_k)
        self.k_proj = linear(d_model, n_kv_head * self.d_k)
        self.v_proj = linear(d_model, n_kv_head * self.d_v)
        self.g_proj = linear(d_model, self.d_v) if config.heads.is_gated else None
        self.r_proj = linear(d_model, n_kv_head * self.d_k)
        self.o_proj = linear(n_head * self.d_v, d_model)
        # Vectors, not tensors by head: optimizers treat parameters by their number of axes.
        self.u = nn.Parameter(torch.zeros(n_head * self.d_k))
        self.v = nn.Parameter(torch.zeros(n_head * self.d_k))

    def set_heads(self, heads: Heads) -> None:
        """Set the geometry that this process works with: a part of the config's with tensor
        parallelism."""
        self.heads = heads
        self.n_kv_head, self.n_group = heads.n_kv_head, heads.n_group
        self.d_k, self.d_v = heads.d_k, heads.d_v

    def _run(self, fn: Callable[..., AttentionOutput], *args: Any) -> AttentionOutput:
        return run(fn, *args, checkpoint_activations=self.checkpoint_activations)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x) if self.config.norm_input else x

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries for content, q + u, and for position, q + v: [b, h, g, t, k] each."""
        q = self.q_proj(x).unflatten(-1, (self.n_kv_head, self.n_group, self.d_k))
        q = rms_norm(q).permute(0, 2, 3, 1, 4)
        u, v = (x.view(self.n_kv_head, self.n_group, 1, self.d_k) for x in (self.u, self.v))
        return (q + u) * self.d_k**-0.25, (q + v) * self.d_k**-0.25

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k: [b, h, t, k] and v: [b, h, t, v]."""
        k = self.k_proj(x).unflatten(-1, (self.n_kv_head, self.d_k)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_head, self.d_v)).transpose(1, 2)
        return rms_norm(k) * self.d_k**-0.25, v if self.g_proj is None else F.silu(v)

    def _residual(self, wv: Tensor, x: Tensor) -> Tensor:
        """Gate (if any) and output projection. wv: [b, h, g, t, v] -> [b, t, d_model]."""
        o = wv.permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(o if self.g_proj is None else gated(o, self.g_proj(x)))

    def _by_distance(self, q: Tensor, sinusoids: Tensor, mask: Tensor | None) -> Tensor:
        """Positional scores of each query for each row of the sinusoids: [b, h, g, t, d]."""
        table = sinusoids if mask is None else sinusoids * mask / (1 - self.config.p_dropsin)
        r_weight = self.r_proj.weight.unflatten(0, (self.n_kv_head, self.d_k)) * self.d_k**-0.25
        return scores_by_distance(q, r_weight, table.to(q.dtype))

    def sinusoids(self, state: AttentionState, seq_len: int) -> Tensor:
        """The table of relative positions for a segment; the same for layers of one shape."""
        weight = self.r_proj.weight
        return relative_sinusoids(
            self._reach(state, seq_len),
            self.config.d_model,
            self.config.pe_wavelength,
            weight.dtype,
            weight.device,
        )

    def _check(self, x: Tensor, state: AttentionState | None) -> None:
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.config.d_model:
            raise ValueError(
                f"input has shape {tuple(x.shape)}, want [batch, tokens >= 1, "
                f"{self.config.d_model}]"
            )
        if state is None:
            return
        if state.k.shape[0] != x.shape[0]:
            raise ValueError(
                f"state is for a batch of {state.k.shape[0]}, input has {x.shape[0]} rows; "
                "use init_state(batch_size) or state.select(rows)"
            )
        got = {
            "keys": tuple(state.k.shape[1:]),
            "values": tuple(state.v.shape[1:]),
            "codes": None if state.z is None else tuple(state.z.shape[1:]),
            "cache": None if state.cache is None else tuple(state.cache.mean.shape[1:]),
        }
        want = self._state_shapes(state.k.shape[2])
        for name in want:
            if got[name] != want[name]:
                raise ValueError(
                    f"state comes from another model: its {name} are {got[name]} per row, this "
                    f"layer needs {want[name]}; start from init_state(batch_size)"
                )

    def _state_shapes(self, window_len: int) -> dict[str, tuple[int, ...] | None]:
        return {
            "keys": (self.n_kv_head, window_len, self.d_k),
            "values": (self.n_kv_head, window_len, self.d_v),
            "codes": None,
            "cache": None,
        }

    def init_state(self, batch_size: int) -> AttentionState:
        """The state before the first token of `batch_size` sequences."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        layout: Packing | None = None,
        sinusoids: Tensor | None = None,
        key_priority: Tensor | None = None,
    ) -> AttentionOutput:
        """x: [b, t, d_model] of any length t from 1 up; `state` as returned for what came before.

        valid: [b, t], False for padding, which may stand anywhere and counts for nothing; its
        output is zero. document_ids: [b, t], tokens attend within their document only.
        key_priority: [b, t] of int64, which keys may become codes; see `VectorQuantizer.forward`.
        layout, sinusoids: what a model has worked out once for all its layers; then x and
        key_priority are in the order of `Packing.gather`.
        """
        self._check(x, state)
        state = self.init_state(x.shape[0]) if state is None else state
        if sinusoids is None:
            sinusoids = self.sinusoids(state, x.shape[1])
        if layout is not None:
            return self._attend(x, state, sinusoids, layout, key_priority)
        layout = read_packing(state, x.shape[1], valid, document_ids)
        if layout is None:
            return self._attend(x, state, sinusoids, None, key_priority)
        if key_priority is not None:
            key_priority = layout.gather(key_priority)
        output = self._attend(layout.gather(x), state, sinusoids, layout, key_priority)
        return replace(output, y=layout.scatter(output.y))

    def _attend(
        self,
        x: Tensor,
        state: AttentionState,
        sinusoids: Tensor,
        layout: Packing | None,
        key_priority: Tensor | None,
    ) -> AttentionOutput:
        raise NotImplementedError

    def _reach(self, state: AttentionState, seq_len: int) -> int:
        """The largest distance that has a positional score."""
        raise NotImplementedError
