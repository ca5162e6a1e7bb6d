"""Attention layers (Definition 3.1): quantized keys in linear time, plain keys in quadratic time.

Scores are (q + u) . k for all keys plus, within the reach of the positional bias, (q + v) . r of
the distance, as in Transformer-XL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.config import AttentionConfig, Reduction
from transformer_vq.errors import UserError
from transformer_vq.nn.heads import Attention, AttentionOutput
from transformer_vq.nn.layers import draw_keep
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer, token_priority
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.position import causal_bias
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.ragged import Packing, newest, next_position, visible_keys
from transformer_vq.ops.state import AttentionState

AUTO_SCORES = 2**25
"""With reduction="auto" a long input is worked on in segments of about this many scores. What a
segment needs then stays in caches and in memory that is handed out again, and time per token does
not depend on the length of the sequence."""


class VQAttention(Attention):
    """Dense causal softmax attention over quantized keys, in linear time: for models of your own.

    Returns the residual branch of Definition 3.1, so a layer is `x = x + attention(x).y`. Pass the
    returned state with the next segment of the same sequences, and once per optimizer step give the
    `code_usage` to `update_codebook`.

    options: fields of `AttentionConfig`, such as head_type, n_head, n_kv_head, d_k, d_v, n_code,
    block_len and norm_input. reduction and checkpoint_activations change how the result is
    computed, not the result.
    """

    def __init__(
        self,
        d_model: int,
        *,
        reduction: Reduction = "auto",
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        config = AttentionConfig(d_model, **options)
        if config.attention != "vq":
            raise UserError("VQAttention has attention='vq'; use FullAttention for the other")
        if reduction not in get_args(Reduction):
            raise UserError(f"reduction={reduction!r}: choose one of {get_args(Reduction)}")
        super().__init__(config, checkpoint_activations)
        self.exchange: Callable[..., AttentionState] | None = None
        """For training on a shard of a sequence: gives the state before it, which other
        processes know, from (k_hat, z, v, state, layout)."""
        self.n_code = config.n_code
        self.block_len = config.block_len
        self.reduction = reduction
        self.compressive_cache = config.compressive_cache
        self.grad_through_cache = config.grad_through_cache
        self.quantizer = VectorQuantizer(
            config.n_code,
            self.d_k,
            self.n_kv_head,
            ema_decay=config.ema_decay,
            codebook_init=config.codebook_init,
            revive_below=config.revive_below,
        )

    def init_state(self, batch_size: int) -> AttentionState:
        weight = self.o_proj.weight
        return AttentionState.empty(
            batch_size,
            self.n_kv_head,
            self.block_len,
            self.d_k,
            self.d_v,
            self.n_code,
            compressive_cache=self.compressive_cache,
            dtype=weight.dtype,
            device=weight.device,
        )

    def _state_shapes(self, window_len: int) -> dict[str, tuple[int, ...] | None]:
        return super()._state_shapes(self.block_len) | {
            "codes": (self.n_kv_head, self.block_len),
            "cache": (self.n_kv_head, self.n_code, self.d_v) if self.compressive_cache else None,
        }

    def update_codebook(self, usage: CodeUsage) -> None:
        self.quantizer.update(usage)

    def _reach(self, state: AttentionState, seq_len: int) -> int:
        return self.block_len

    def _attend(
        self,
        x: Tensor,
        state: AttentionState,
        sinusoids: Tensor,
        layout: Packing | None,
        key_priority: Tensor | None,
    ) -> AttentionOutput:
        state = self._with_mask(state)
        outputs: list[AttentionOutput] = []
        layouts: list[Packing | None] = []
        start = 0
        if key_priority is None and self.training and self.quantizer.uses_candidates:
            valid = None if layout is None else layout.valid
            key_priority = token_priority(x.shape[0], x.shape[1], valid, x.device)
        segment_len = self._segment_len(*x.shape[:2])
        for segment in (x,) if segment_len >= x.shape[1] else x.split(segment_len, dim=1):
            stop = start + segment.shape[1]
            part = None if layout is None else layout.part(start, stop)
            priority = None if key_priority is None else key_priority[:, start:stop]
            output = self._run(self._segment, segment, state, sinusoids, part, priority)
            outputs.append(output)
            layouts.append(part)
            state, start = output.state, stop
        output = outputs[0] if len(outputs) == 1 else _join(outputs, layouts)
        if layout is None:
            return output
        return replace(output, state=replace(output.state, document=layout.document))

    def _segment_len(self, batch_size: int, seq_len: int) -> int:
        """How many tokens all operations of the layer work on at a time."""
        if self._shares_sequences():
            return seq_len
        if self.reduction == "input_scan":
            return self.block_len
        if self.reduction != "auto":
            return seq_len
        n_scores = batch_size * self.n_kv_head * self.n_group * (self.n_code + 2 * self.block_len)
        return max(1, AUTO_SCORES // (n_scores * self.block_len)) * self.block_len

    def _segment(
        self,
        x: Tensor,
        state: AttentionState,
        sinusoids: Tensor,
        layout: Packing | None,
        key_priority: Tensor | None,
    ) -> AttentionOutput:
        x_tilde = self._normed(x)
        q_content, q_position = self._queries(x_tilde)
        k, v = self._keys_and_values(x_tilde)
        quantized = self.quantizer(k, None if layout is None else layout.valid, key_priority)
        if self.exchange is not None and self._shares_sequences():
            state = self.exchange(quantized.k_hat, quantized.z, v, state, layout)
        wv, state = vq_attention(
            q_content,
            quantized.k_hat,
            quantized.z,
            v,
            self.quantizer.codebook,
            self._by_distance(q_position, sinusoids, state.sinusoid_mask),
            state,
            layout=layout,
            reduction=self.reduction,
            grad_through_cache=self.grad_through_cache,
        )
        y = self._residual(wv, x_tilde)
        return AttentionOutput(y, state, quantized.commit_loss, quantized.usage)

    def _shares_sequences(self) -> bool:
        return self.training and self.exchange is not None

    def _with_mask(self, state: AttentionState) -> AttentionState:
        """In training a fresh mask if all rows are at their start, else the one carried along."""
        if not self.training or self.config.p_dropsin == 0.0:
            return state if state.sinusoid_mask is None else replace(state, sinusoid_mask=None)
        shape = (self.block_len + 1, self.config.d_model)
        mask = draw_keep(shape, self.config.p_dropsin, state.k.device)
        if state.sinusoid_mask is not None:
            mask = torch.where((state.position == 0).all(), mask, state.sinusoid_mask)
        return replace(state, sinusoid_mask=mask)


class FullAttention(Attention):
    """The quadratic baseline: the same layer, keys as they are, positional bias at any distance."""

    def __init__(
        self, d_model: int, *, checkpoint_activations: bool = False, **options: Any
    ) -> None:
        config = AttentionConfig(d_model, **{"attention": "full", **options})
        super().__init__(config, checkpoint_activations)

    def init_state(self, batch_size: int) -> AttentionState:
        weight = self.o_proj.weight
        return AttentionState.empty(
            batch_size,
            self.n_kv_head,
            0,
            self.d_k,
            self.d_v,
            dtype=weight.dtype,
            device=weight.device,
        )

    def _reach(self, state: AttentionState, seq_len: int) -> int:
        return state.k.shape[-2] + seq_len - 1

    def _attend(
        self,
        x: Tensor,
        state: AttentionState,
        sinusoids: Tensor,
        layout: Packing | None,
        key_priority: Tensor | None,
    ) -> AttentionOutput:
        """The state grows by as many keys and values as there are tokens."""
        return self._run(self._forward, x, state, sinusoids, layout)

    def _forward(
        self, x: Tensor, state: AttentionState, sinusoids: Tensor, layout: Packing | None
    ) -> AttentionOutput:
        x_tilde = self._normed(x)
        q_content, q_position = self._queries(x_tilde)
        k, v = self._keys_and_values(x_tilde)
        n_past, seq_len = state.k.shape[-2], x.shape[1]
        k_all = torch.cat([state.k.to(k.dtype), k], dim=-2)
        v_all = torch.cat([state.v.to(v.dtype), v], dim=-2)
        mask = self._mask(state, n_past + seq_len)
        bias = causal_bias(self._by_distance(q_position, sinusoids, mask))
        length = None
        if layout is not None:
            length = layout.length
            seen = visible_keys(layout, n_past, n_blocks=1).local
            bias = bias.masked_fill(~seen[:, :, None].transpose(1, 2), -torch.inf)
        elif n_past > 0:  # rows that were reset have empty slots
            empty = ~state.window_valid
            bias = bias.masked_fill(F.pad(empty, (0, seq_len))[:, None, None, None], -torch.inf)
        wv = quadratic_attention(q_content, k_all, v_all, bias)
        after = AttentionState(
            k=k_all if length is None else newest(state.k, k, n_past + seq_len, length, dim=-2),
            v=v_all if length is None else newest(state.v, v, n_past + seq_len, length, dim=-2),
            position=next_position(state.position, seq_len, layout),
            document=state.document if layout is None else layout.document,
            sinusoid_mask=mask,
        )
        return AttentionOutput(self._residual(wv, x_tilde), after, x.new_zeros(()), None)

    def _mask(self, state: AttentionState, n_key: int) -> Tensor | None:
        """As for VQ, but the table has a row for every distance so far and grows at the far end."""
        if not self.training or self.config.p_dropsin == 0.0:
            return None
        mask = draw_keep((n_key, self.config.d_model), self.config.p_dropsin, state.k.device)
        carried = state.sinusoid_mask
        if carried is not None:
            known = mask[-carried.shape[0] :]
            known = torch.where((state.position == 0).all(), known, carried)
            mask = torch.cat([mask[: -carried.shape[0]], known])
        return mask


def _join(outputs: list[AttentionOutput], layouts: list[Packing | None]) -> AttentionOutput:
    """One output for consecutive segments; the commit loss stays a mean over tokens that count."""
    y = torch.cat([output.y for output in outputs], dim=1)
    n_tokens = [
        torch.tensor(output.y.shape[:2].numel(), device=y.device)
        if layout is None or layout.length is None
        else layout.length.sum()
        for output, layout in zip(outputs, layouts, strict=True)
    ]
    total = torch.stack(n_tokens).sum().clamp(min=1)
    losses = [output.commit_loss * n / total for output, n in zip(outputs, n_tokens, strict=True)]
    usages = [output.code_usage for output in outputs if output.code_usage is not None]
    return AttentionOutput(y, outputs[-1].state, reduce(add, losses), reduce(add, usages))
