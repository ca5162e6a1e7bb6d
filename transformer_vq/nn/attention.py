"""Attention layers (Definition 3.1): projections, norms and heads around `transformer_vq.ops`.

Scores are (q + u) . k for all keys plus, within the reach of the positional bias, (q + v) . r of
the distance, as in Transformer-XL. One layout serves the three head types: h key/value heads with
g query heads each. SHGA has h = g = 1, wide values and a gate; MQA h = 1; MHA g = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.nn.layers import draw_keep, linear, rms_norm, run
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.position import causal_bias, relative_sinusoids, scores_by_distance
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.state import AttentionState

AUTO_SCORES = 2**23
"""With reduction="auto" a long input is worked on in segments of about this many scores. What a
segment needs then stays in caches and in memory that is handed out again, and time per token does
not depend on the length of the sequence."""


@dataclass(frozen=True)
class AttentionOutput:
    """y: [b, t, d_model] the residual branch, state: after this segment; usage is None if full."""

    y: Tensor
    state: AttentionState
    commit_loss: Tensor
    code_usage: CodeUsage | None


class _Attention(nn.Module):
    """What attention with and without quantized keys have in common: all projections."""

    def __init__(
        self, d_model: int, head_type: str, d_k: int, p_dropsin: float, pe_wavelength: float
    ) -> None:
        super().__init__()
        if head_type not in ("shga", "mqa", "mha"):
            raise ValueError(f"head_type={head_type!r}: choose 'shga', 'mqa' or 'mha'")
        if head_type != "shga" and d_model % d_k:
            raise ValueError(f"d_model={d_model} must be a multiple of d_k={d_k} for {head_type!r}")
        n_query_head = 1 if head_type == "shga" else d_model // d_k
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = 2 * d_model if head_type == "shga" else d_k
        self.n_head = n_query_head if head_type == "mha" else 1
        self.n_group = n_query_head // self.n_head
        self.p_dropsin = p_dropsin
        self.pe_wavelength = pe_wavelength

        self.q_proj = linear(d_model, n_query_head * d_k)
        self.k_proj = linear(d_model, self.n_head * d_k)
        self.v_proj = linear(d_model, self.n_head * self.d_v)
        self.g_proj = linear(d_model, self.d_v) if head_type == "shga" else None
        self.r_proj = linear(d_model, self.n_head * d_k)
        self.o_proj = linear(n_query_head * self.d_v, d_model)
        self.u = nn.Parameter(torch.zeros(self.n_head, self.n_group, 1, d_k))
        self.v = nn.Parameter(torch.zeros(self.n_head, self.n_group, 1, d_k))

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries for content, q + u, and for position, q + v: [b, h, g, t, k] each."""
        q = self.q_proj(x).unflatten(-1, (self.n_head, self.n_group, self.d_k))
        q = rms_norm(q).permute(0, 2, 3, 1, 4)
        return (q + self.u) * self.d_k**-0.25, (q + self.v) * self.d_k**-0.25

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k: [b, h, t, k] and v: [b, h, t, v]."""
        k = self.k_proj(x).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.n_head, self.d_v)).transpose(1, 2)
        return rms_norm(k) * self.d_k**-0.25, v if self.g_proj is None else F.silu(v)

    def _residual(self, wv: Tensor, x: Tensor) -> Tensor:
        """Gate (if any) and output projection. wv: [b, h, g, t, v] -> [b, t, d_model]."""
        o = wv.permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(o if self.g_proj is None else o * F.silu(self.g_proj(x)))

    def _by_distance(self, q: Tensor, sinusoids: Tensor, mask: Tensor | None) -> Tensor:
        """Positional scores of each query for each row of the sinusoids: [b, h, g, t, d]."""
        table = sinusoids if mask is None else sinusoids * mask / (1 - self.p_dropsin)
        r_weight = self.r_proj.weight.unflatten(0, (self.n_head, self.d_k)) * self.d_k**-0.25
        return scores_by_distance(q, r_weight, table.to(q.dtype))

    def _sinusoids(self, max_distance: int) -> Tensor:
        weight = self.r_proj.weight
        return relative_sinusoids(
            max_distance, self.d_model, self.pe_wavelength, weight.dtype, weight.device
        )

    def _check(self, x: Tensor, state: AttentionState | None) -> None:
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.d_model:
            raise ValueError(
                f"input has shape {tuple(x.shape)}, want [batch, tokens >= 1, {self.d_model}]"
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
            "keys": (self.n_head, window_len, self.d_k),
            "values": (self.n_head, window_len, self.d_v),
            "codes": None,
            "cache": None,
        }

    def init_state(self, batch_size: int) -> AttentionState:
        raise NotImplementedError


class VQAttention(_Attention):
    """Dense causal softmax attention over quantized keys, in linear time: for models of your own.

    Returns the residual branch of Definition 3.1, so a layer is `x = x + attention(x).y`; the input
    is normalised inside. Pass the returned state with the next segment of the same sequences, and
    once per optimizer step give the `code_usage` to `update_codebook`. With `recompute` activations
    are computed again in backward instead of being kept.
    """

    def __init__(
        self,
        d_model: int,
        *,
        head_type: str = "shga",
        d_k: int = 128,
        n_code: int = 512,
        block_len: int = 512,
        reduction: str = "auto",
        compressive_cache: bool = True,
        grad_through_cache: bool = True,
        p_dropsin: float = 0.0,
        pe_wavelength: float = 1e5,
        ema_decay: float = 0.99,
        codebook_init: str = "random",
        revive_below: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__(d_model, head_type, d_k, p_dropsin, pe_wavelength)
        self.recompute = recompute
        self.n_code = n_code
        self.block_len = block_len
        self.reduction = reduction
        self.compressive_cache = compressive_cache
        self.grad_through_cache = grad_through_cache
        self.quantizer = VectorQuantizer(
            n_code,
            d_k,
            self.n_head,
            ema_decay=ema_decay,
            codebook_init=codebook_init,
            revive_below=revive_below,
        )

    def init_state(self, batch_size: int) -> AttentionState:
        weight = self.o_proj.weight
        return AttentionState.empty(
            batch_size,
            self.n_head,
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
            "codes": (self.n_head, self.block_len),
            "cache": (self.n_head, self.n_code, self.d_v) if self.compressive_cache else None,
        }

    def update_codebook(self, usage: CodeUsage) -> None:
        self.quantizer.update(usage)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, *, sinusoids: Tensor | None = None
    ) -> AttentionOutput:
        """x: [b, t, d_model], any t from 1 up. `sinusoids` spares a model computing them again."""
        self._check(x, state)
        state = self._with_mask(self.init_state(x.shape[0]) if state is None else state)
        if sinusoids is None:
            sinusoids = self._sinusoids(self.block_len)
        outputs = []
        for segment in x.split(self._segment_len(*x.shape[:2]), dim=1):
            output = run(self._segment, segment, state, sinusoids, recompute=self.recompute)
            outputs.append(output)
            state = output.state
        return outputs[0] if len(outputs) == 1 else _join(outputs)

    def _segment_len(self, batch_size: int, seq_len: int) -> int:
        """How many tokens all operations of the layer work on at a time."""
        if self.reduction == "input_scan":
            return self.block_len
        if self.reduction != "auto":
            return seq_len
        n_scores = batch_size * self.n_head * self.n_group * (self.n_code + 2 * self.block_len)
        return max(1, AUTO_SCORES // (n_scores * self.block_len)) * self.block_len

    def _segment(self, x: Tensor, state: AttentionState, sinusoids: Tensor) -> AttentionOutput:
        x_tilde = rms_norm(x)
        q_content, q_position = self._queries(x_tilde)
        k, v = self._keys_and_values(x_tilde)
        quantized = self.quantizer(k)
        wv, state = vq_attention(
            q_content,
            quantized.k_hat,
            quantized.z,
            v,
            self.quantizer.codebook,
            self._by_distance(q_position, sinusoids, state.sinusoid_mask),
            state,
            reduction=self.reduction,
            grad_through_cache=self.grad_through_cache,
        )
        y = self._residual(wv, x_tilde)
        return AttentionOutput(y, state, quantized.commit_loss, quantized.usage)

    def _with_mask(self, state: AttentionState) -> AttentionState:
        """In training a fresh mask if all rows are at their start, else the one carried along."""
        if not self.training or self.p_dropsin == 0.0:
            return state if state.sinusoid_mask is None else replace(state, sinusoid_mask=None)
        shape = (self.block_len + 1, self.d_model)
        mask = draw_keep(shape, self.p_dropsin, state.k.device)
        if state.sinusoid_mask is not None:
            mask = torch.where((state.position == 0).all(), mask, state.sinusoid_mask)
        return replace(state, sinusoid_mask=mask)


class FullAttention(_Attention):
    """The quadratic baseline: the same layer, keys as they are, positional bias at any distance."""

    def __init__(
        self,
        d_model: int,
        *,
        head_type: str = "shga",
        d_k: int = 128,
        p_dropsin: float = 0.0,
        pe_wavelength: float = 1e5,
        recompute: bool = False,
    ) -> None:
        super().__init__(d_model, head_type, d_k, p_dropsin, pe_wavelength)
        self.recompute = recompute

    def init_state(self, batch_size: int) -> AttentionState:
        weight = self.o_proj.weight
        return AttentionState.empty(
            batch_size, self.n_head, 0, self.d_k, self.d_v, dtype=weight.dtype, device=weight.device
        )

    def forward(
        self, x: Tensor, state: AttentionState | None = None, *, sinusoids: Tensor | None = None
    ) -> AttentionOutput:
        """x: [b, t, d_model]; the state grows by t keys and values."""
        self._check(x, state)
        state = self.init_state(x.shape[0]) if state is None else state
        if sinusoids is None:
            sinusoids = self._sinusoids(state.k.shape[-2] + x.shape[1] - 1)
        return run(self._forward, x, state, sinusoids, recompute=self.recompute)

    def _forward(self, x: Tensor, state: AttentionState, sinusoids: Tensor) -> AttentionOutput:
        x_tilde = rms_norm(x)
        q_content, q_position = self._queries(x_tilde)
        k, v = self._keys_and_values(x_tilde)
        k = torch.cat([state.k.to(k.dtype), k], dim=-2)
        v = torch.cat([state.v.to(v.dtype), v], dim=-2)
        mask = self._mask(state, n_key=k.shape[-2])
        bias = causal_bias(self._by_distance(q_position, sinusoids, mask))
        after = AttentionState(k, v, state.position + x.shape[1], sinusoid_mask=mask)
        if state.k.shape[-2] > 0:  # rows that were reset have empty slots
            bias = bias.masked_fill(~after.window_valid[:, None, None, None], -torch.inf)
        wv = quadratic_attention(q_content, k, v, bias)
        return AttentionOutput(self._residual(wv, x_tilde), after, x.new_zeros(()), None)

    def _mask(self, state: AttentionState, n_key: int) -> Tensor | None:
        """As for VQ, but the table has a row for every distance so far and grows at the far end."""
        if not self.training or self.p_dropsin == 0.0:
            return None
        mask = draw_keep((n_key, self.d_model), self.p_dropsin, state.k.device)
        carried = state.sinusoid_mask
        if carried is not None:
            known = mask[-carried.shape[0] :]
            known = torch.where((state.position == 0).all(), known, carried)
            mask = torch.cat([mask[: -carried.shape[0]], known])
        return mask


def _join(outputs: list[AttentionOutput]) -> AttentionOutput:
    """One output for consecutive blocks; the commit loss stays a mean over tokens."""
    y = torch.cat([output.y for output in outputs], dim=1)
    commit_loss = y.new_zeros(())
    usage = None
    for output in outputs:
        commit_loss = commit_loss + output.commit_loss * (output.y.shape[1] / y.shape[1])
        assert output.code_usage is not None
        usage = output.code_usage if usage is None else usage + output.code_usage
    return AttentionOutput(y, outputs[-1].state, commit_loss, usage)
