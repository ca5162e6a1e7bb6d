"""Attention layers with rotary positions (position="rope"): exact keys near, codes far.

Within block_len, scores are those of RoPE. Beyond it, all keys have one relative position, so that
the cache holds them; see `ops.rotary`. Full attention is that of Llama and its descendants.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.config import Backend, Reduction
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import AttentionOutput, FullAttention, VQAttention
from transformer_vq.ops import packing as pack
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.packing import Packing
from transformer_vq.ops.rotary import (
    RotaryInputs,
    block_rotations,
    rotary_attention,
    rotate,
    rotations,
    token_kind,
)
from transformer_vq.ops.state import AttentionState, FullState, RotaryState, VQState


class RotaryVQAttention(VQAttention):
    """`VQAttention` with rotary positions: the same interface, state and codebooks."""

    exact_above: Tensor

    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, **options)
        # Keys with a larger quantization error are worth a slot; calibration sets the thresholds.
        self.register_buffer("exact_above", torch.zeros(self.n_kv_head))

    def set_method(self, reduction: Reduction, backend: Backend) -> None:
        super().set_method(reduction, backend)
        if backend == "triton":
            raise UserError("backend='triton' has no kernels for position='rope'; use 'eager'")
        if reduction in ("matmul", "associative"):
            raise UserError(f"reduction={reduction!r} is not available for position='rope'")

    def init_state(self, batch_size: int, device: torch.device | None = None) -> RotaryState:
        state = super().init_state(batch_size, device)
        return RotaryState.with_slots(state, self.config.n_sink + self.config.n_exact)

    def sinusoids(self, state: AttentionState, seq_len: int) -> Tensor:
        """Return the rotations of all places of a block, and of the constant position."""
        config = self.config
        lens = seq_len, config.block_len
        return block_rotations(*lens, config.distant, self.d_k, config.rope_theta, state.k)

    def _segment(
        self,
        x: Tensor,
        packing: Packing | None,
        key_priority: Tensor | None,
        state: VQState,
        sinusoids: Tensor,
    ) -> AttentionOutput[VQState]:
        assert isinstance(state, RotaryState)
        config, x_tilde = self.config, self.norm(x)
        q = self.plain_queries(x_tilde) * self.d_k**-0.25
        k, v = self.keys_and_values(x_tilde)
        valid = None if packing is None else packing.valid
        quantized = self.quantizer(k, valid, key_priority)
        steps = torch.arange(x.shape[1], device=x.device)
        position = state.position.unsqueeze(-1) + steps if packing is None else packing.positions
        kind = token_kind(
            quantized.error, self.exact_above, position, config.n_sink, config.n_exact
        )
        assert self.quantizer.code_bias is not None
        inputs = RotaryInputs(
            q,
            quantized.k_hat if config.quantize_window else k,
            quantized.z,
            v,
            kind,
            quantized.codebook,
            self.quantizer.code_bias,
            sinusoids,
            packing,
        )
        wv, after = rotary_attention(inputs, state, config.n_sink, config.grad_through_cache)
        y = self.residual(wv, x_tilde)
        return AttentionOutput(y, after, quantized.commit_loss, quantized.usage)

    def _state_shapes(self, state: AttentionState) -> dict[str, tuple[int, ...]]:
        slots = (self.n_kv_head, self.config.n_sink + self.config.n_exact, self.d_k)
        return super()._state_shapes(state) | {"slots": slots}


class RotaryFullAttention(FullAttention):
    """Full attention with rotary positions, as in Llama. The state holds keys before rotation."""

    def sinusoids(self, state: AttentionState, seq_len: int) -> Tensor:
        """Return the rotations of all keys, from the oldest to the newest."""
        places = torch.arange(state.k.shape[-2] + seq_len, device=state.k.device)
        dtype = accumulation_dtype(state.k.dtype)
        return rotations(places, self.d_k, self.config.rope_theta, dtype)

    def _segment(
        self,
        x: Tensor,
        packing: Packing | None,
        key_priority: Tensor | None,
        state: FullState,
        sinusoids: Tensor,
    ) -> AttentionOutput[FullState]:
        x_tilde = self.norm(x)
        q = self.plain_queries(x_tilde) * self.d_k**-0.25
        k, v = self.keys_and_values(x_tilde)
        n_past, seq_len = state.k.shape[-2], x.shape[1]
        k_all, v_all = (
            torch.cat([state.k.to(k.dtype), k], -2),
            torch.cat([state.v.to(v.dtype), v], -2),
        )
        mask = length = None
        if packing is not None or n_past > 0:
            start = -state.position.unsqueeze(-1).expand(-1, seq_len)
            place = torch.arange(-n_past, seq_len, device=x.device)
            if packing is not None:
                start, length = packing.doc_start, packing.length
            mask = (place >= start.unsqueeze(-1)) & (place <= place[n_past:, None])
            mask = mask.unsqueeze(1)  # [b, 1, i, j]
        wv = F.scaled_dot_product_attention(
            rotate(q, sinusoids[n_past:]).flatten(1, 2),
            rotate(k_all, sinusoids),
            v_all,
            mask,
            is_causal=mask is None,
            scale=1.0,
            enable_gqa=self.n_group > 1,
        ).unflatten(1, (self.n_kv_head, self.n_group))
        total = n_past + seq_len
        after = FullState(
            k_all if length is None else pack.newest(state.k, k, total, length, dim=-2),
            v_all if length is None else pack.newest(state.v, v, total, length, dim=-2),
            pack.next_position(state.position, seq_len, packing),
            document=state.document,
        )
        return AttentionOutput(self.residual(wv, x_tilde), after, wv.new_zeros(()), None)
