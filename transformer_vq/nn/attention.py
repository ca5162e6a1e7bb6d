"""Attention layers (Definition 3.1): quantized keys in linear time, plain keys in quadratic time.

Scores are (q + u) . k for all keys plus, within the range of the positional bias, (q + v) . r of
the distance, as in Transformer-XL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.config import AttentionConfig, Reduction
from transformer_vq.errors import UserError
from transformer_vq.nn.layers import draw_keep
from transformer_vq.nn.projections import AttentionLayer, AttentionOutput, LayerInputs
from transformer_vq.nn.quantizer import CodeUsage, FindCode, VectorQuantizer, token_priority
from transformer_vq.ops import triton
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.execution import Execution, execution_on
from transformer_vq.ops.inputs import AttentionInputs, segment_lens
from transformer_vq.ops.position import causal_bias
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.ragged import Packing, newest, next_position, visible_keys
from transformer_vq.ops.reductions import check_reduction
from transformer_vq.ops.shapes import is_symbolic, symbolic_blocks
from transformer_vq.ops.state import AttentionState


class VQAttention(AttentionLayer):
    """Dense causal softmax attention over quantized keys in linear time, for use in other models.

    Returns the residual branch of Definition 3.1, so a layer is `x = x + attention(x).y`. Pass the
    returned state with the next segment of the same sequences. Once per optimizer step, pass the
    returned `code_usage` to `update_codebook`.

    options: fields of `AttentionConfig`, such as head_type, n_head, n_kv_head, d_k, d_v, n_code,
    block_len and norm_input. By default one gated head (shga); with n_head=8, eight heads of width
    d_model / 8 (mha); with n_kv_head=2 as well, two key/value heads (gqa).
    reduction, checkpoint_activations and execution select how the result is computed; they do not
    change it. reduction="triton" needs the extra `triton` and a GPU.
    execution: None selects that of the input's device.
    """

    def __init__(
        self,
        d_model: int,
        *,
        reduction: Reduction = "auto",
        checkpoint_activations: bool = False,
        execution: Execution | None = None,
        **options: Any,
    ) -> None:
        config = AttentionConfig.for_layer(d_model, **options)
        if config.attention != "vq":
            raise UserError("VQAttention needs attention='vq'; use FullAttention instead")
        check_reduction(reduction)
        if reduction == "triton":
            triton.check_package()
        super().__init__(config, checkpoint_activations)
        self.reduction = reduction
        self.execution = execution
        self.quantizer = VectorQuantizer(
            config.n_code,
            self.d_k,
            self.n_kv_head,
            ema_decay=config.ema_decay,
            codebook_init=config.codebook_init,
            revive_below=config.revive_below,
        )
        self.exchange: Callable[[AttentionInputs, AttentionState], AttentionState] | None = None
        """Context parallelism: in training, returns the state before this rank's shard."""

    def init_state(self, batch_size: int, device: torch.device | None = None) -> AttentionState:
        config = self.config
        return self._empty_state(
            batch_size,
            config.block_len,
            device,
            n_code=config.n_code,
            compressive_cache=config.compressive_cache,
        )

    def update_codebook(self, code_usage: CodeUsage) -> None:
        """Move the codebook toward the keys of `code_usage`; call once per optimizer step."""
        self.quantizer.update_codebook(code_usage)

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        return self.config.block_len

    def symbolic_blocks(self, seq_len: int) -> int | None:
        return symbolic_blocks(seq_len, self.config.block_len)

    def segment_len(self, batch_size: int, seq_len: int, device: torch.device | None = None) -> int:
        """Return the maximum number of tokens that the layer processes at a time.

        device: of the input; by default that of the layer.
        """
        if self._is_sharded() or self.reduction not in ("auto", "input_scan"):
            return seq_len
        block_len = self.config.block_len
        if self.reduction == "input_scan":
            return block_len
        if is_symbolic(batch_size):
            return seq_len
        n_scores = batch_size * self.heads.n_head * (self.config.n_code + 2 * block_len)
        execution = self.execution or execution_on(self.u.device if device is None else device)
        return max(1, execution.segment_scores // (n_scores * block_len)) * block_len

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        packing: Packing | None = None,
        sinusoids: Tensor | None = None,
        key_priority: Tensor | None = None,
        n_blocks: int | None = None,
    ) -> AttentionOutput:
        """Attend within the next segment of each sequence, and to all earlier ones.

        x: [b, t, d_model] with any t >= 1, state: as returned for the previous segment.
        valid: [b, t], False for padding, which may be anywhere; it is ignored, and its output is
        zero. document_ids: [b, t]; tokens attend within their document only.
        key_priority: [b, t] of int64, which keys may become codes; see `VectorQuantizer.forward`.
        packing, sinusoids, n_blocks: computed once by a model for all its layers; x and
        key_priority are then in the order of `Packing.gather`.
        """
        inputs, state = self._start(x, state, valid, document_ids, packing, sinusoids, key_priority)
        inputs = inputs if n_blocks is None else replace(inputs, n_blocks=n_blocks)
        state = self._with_sinusoid_mask(state)
        inputs = self._with_key_priority(inputs)
        attend = self._checkpointed(self._segment)
        outputs: list[AttentionOutput] = []
        n_rows, seq_len = x.shape[:2]
        max_len = self.segment_len(n_rows, seq_len, x.device)
        lens = segment_lens(seq_len, self.config.block_len, max_len)
        segments = inputs.split(lens)
        for segment in segments:
            outputs.append(attend(segment, state))
            state = outputs[-1].state
        return inputs.finish(_join(outputs, segments))

    def _segment(self, inputs: LayerInputs, state: AttentionState) -> AttentionOutput:
        """Project, quantize and attend for one segment."""
        x_tilde, packing = self.norm(inputs.x), inputs.packing
        q_content, q_position = self.queries(x_tilde)
        k, v = self.keys_and_values(x_tilde)
        valid = None if packing is None else packing.valid
        quantized = self.quantizer(k, valid, inputs.key_priority, self._find_code(k.device))
        k_hat, z, codebook = quantized.k_hat, quantized.z, quantized.codebook
        by_distance = self.by_distance(q_position, inputs.sinusoids, state.sinusoid_mask)
        if self.exchange is not None and self._is_sharded():
            shard = AttentionInputs(q_content, k_hat, z, v, codebook, by_distance, packing)
            state = self.exchange(shard, state)
        wv, state = vq_attention(
            q_content,
            k_hat,
            z,
            v,
            codebook,
            by_distance,
            state,
            packing=packing,
            reduction=self.reduction,
            grad_through_cache=self.config.grad_through_cache,
            n_blocks=inputs.n_blocks,
            execution=self.execution,
        )
        y = self.residual(wv, x_tilde)
        return AttentionOutput(y, state, quantized.commit_loss, quantized.usage)

    def _find_code(self, device: torch.device) -> FindCode | None:
        """Return the kernel that finds codes, for reduction="triton" only."""
        if self.reduction != "triton":
            return None
        triton.check_device(device)

        from transformer_vq.ops.triton.nearest import nearest_code

        return nearest_code

    def _is_sharded(self) -> bool:
        """Return whether this rank has a shard of each sequence (context parallelism)."""
        return self.training and self.exchange is not None

    def _with_sinusoid_mask(self, state: AttentionState) -> AttentionState:
        """In training, draw a new dropout mask if all rows are at their start, else keep it."""
        if not self.training or self.config.p_dropsin == 0.0:
            return state if state.sinusoid_mask is None else replace(state, sinusoid_mask=None)
        shape = (self.config.block_len + 1, self.config.d_model)
        mask = draw_keep(shape, self.config.p_dropsin, state.k.device)
        if state.sinusoid_mask is not None:
            mask = torch.where((state.position == 0).all(), mask, state.sinusoid_mask)
        return replace(state, sinusoid_mask=mask)

    def _with_key_priority(self, inputs: LayerInputs) -> LayerInputs:
        """Fill in default priorities, where training may replace codes with keys."""
        uses_candidates = self.training and self.quantizer.uses_candidates
        if inputs.key_priority is not None or not uses_candidates:
            return inputs
        valid = None if inputs.packing is None else inputs.packing.valid
        b, t, _ = inputs.x.shape
        priority = token_priority(b, t, valid, inputs.x.device)
        return replace(inputs, key_priority=priority)

    def _state_shapes(self, window_len: int) -> dict[str, tuple[int, ...] | None]:
        config, h = self.config, self.n_kv_head
        return super()._state_shapes(config.block_len) | {
            "codes": (h, config.block_len),
            "cache": (h, config.n_code, self.d_v) if config.compressive_cache else None,
        }


class FullAttention(AttentionLayer):
    """The quadratic baseline: the same layer with plain keys and no limit on the distance."""

    def __init__(
        self, d_model: int, *, checkpoint_activations: bool = False, **options: Any
    ) -> None:
        config = AttentionConfig.for_layer(d_model, **{"attention": "full", **options})
        super().__init__(config, checkpoint_activations)

    def init_state(self, batch_size: int, device: torch.device | None = None) -> AttentionState:
        return self._empty_state(batch_size, 0, device)

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        return state.k.shape[-2] + seq_len - 1

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        packing: Packing | None = None,
        sinusoids: Tensor | None = None,
        key_priority: Tensor | None = None,
        n_blocks: int | None = None,
    ) -> AttentionOutput:
        """Attend as `VQAttention.forward` does; the state grows by one key and value per token."""
        inputs, state = self._start(x, state, valid, document_ids, packing, sinusoids, None)
        return inputs.finish(self._checkpointed(self._segment)(inputs, state))

    def _segment(self, inputs: LayerInputs, state: AttentionState) -> AttentionOutput:
        x_tilde, packing = self.norm(inputs.x), inputs.packing
        q_content, q_position = self.queries(x_tilde)
        k, v = self.keys_and_values(x_tilde)
        n_past, seq_len = state.k.shape[-2], inputs.x.shape[1]
        k_all = torch.cat([state.k.to(k.dtype), k], dim=-2)
        v_all = torch.cat([state.v.to(v.dtype), v], dim=-2)
        mask = self._sinusoid_mask(state, n_past + seq_len)
        bias = causal_bias(self.by_distance(q_position, inputs.sinusoids, mask))
        length = None
        if packing is not None:
            length = packing.length
            visible = visible_keys(packing, n_past, n_blocks=1).local
            bias = bias.masked_fill(~visible[:, :, None].transpose(1, 2), -torch.inf)
        elif n_past > 0:  # rows that were reset have empty slots
            empty = ~state.window_valid
            bias = bias.masked_fill(F.pad(empty, (0, seq_len))[:, None, None, None], -torch.inf)
        wv = quadratic_attention(q_content, k_all, v_all, bias)
        after = AttentionState(
            k=k_all if length is None else newest(state.k, k, n_past + seq_len, length, dim=-2),
            v=v_all if length is None else newest(state.v, v, n_past + seq_len, length, dim=-2),
            position=next_position(state.position, seq_len, packing),
            document=state.document,
            sinusoid_mask=mask,
        )
        return AttentionOutput(self.residual(wv, x_tilde), after, x_tilde.new_zeros(()), None)

    def _sinusoid_mask(self, state: AttentionState, n_key: int) -> Tensor | None:
        """Return the dropout mask, which has a row per distance and grows at the far end."""
        if not self.training or self.config.p_dropsin == 0.0:
            return None
        mask = draw_keep((n_key, self.config.d_model), self.config.p_dropsin, state.k.device)
        carried = state.sinusoid_mask
        if carried is not None:
            known = mask[-carried.shape[0] :]
            known = torch.where((state.position == 0).all(), known, carried)
            mask = torch.cat([mask[: -carried.shape[0]], known])
        return mask


def _join(outputs: list[AttentionOutput], segments: list[LayerInputs]) -> AttentionOutput:
    """Return one output for consecutive segments; the commit loss is a mean over valid tokens."""
    if len(outputs) == 1:
        return outputs[0]
    y = torch.cat([output.y for output in outputs], dim=1)
    n_tokens = [
        torch.full((), segment.x.shape[0] * segment.x.shape[1], device=y.device)
        if segment.packing is None or segment.packing.length is None
        else segment.packing.length.sum()
        for segment in segments
    ]
    total = torch.stack(n_tokens).sum().clamp(min=1)
    losses = [output.commit_loss * n / total for output, n in zip(outputs, n_tokens, strict=True)]
    usages = [output.code_usage for output in outputs if output.code_usage is not None]
    usage = reduce(add, usages) if usages else None
    return AttentionOutput(y, outputs[-1].state, reduce(add, losses), usage)
