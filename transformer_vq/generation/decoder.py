"""Decoding in place: the same function as `TransformerVQ.forward`, one token per row and call.

Everything that depends only on weights is computed once: one matrix for all input projections of a
layer, and one table of codewords and projected sinusoids. With quantized keys the state does not
grow, so every token costs the same; full attention preallocates memory for the new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.config import ModelConfig
from transformer_vq.device import evaluating
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import NORM_EPS, is_plain
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ
from transformer_vq.ops import triton
from transformer_vq.ops.cache import accumulation_dtype, lookup
from transformer_vq.ops.decode import DecodeState, Step, Token, attend_one_
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.runtime import full_precision
from transformer_vq.ops.state import FullState, VQState


class Decoder:
    """A model that continues from a copy of a state, without dropout and gradients.

    room: maximum number of new tokens; needed for full attention only, whose state grows.
    state_dtype: that of the values in the state, for VQ attention. bfloat16 halves what a step
    reads of it; means are still updated in float32.

    Models with rotary positions or gains of norms are run by `forward`, one token at a time.
    """

    def __init__(
        self,
        model: TransformerVQ,
        state: ModelState,
        room: int = 0,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self._by_forward = None if _has_constants(model.config) else state.detach()
        """The state, if steps are those of `forward`."""
        if self._by_forward is not None:
            return
        self._position = state.position.clone()
        states = state.detach().layers
        self._dtype = states[0].v.dtype
        attentions = [x for x in model.branches if isinstance(x, VQAttention | FullAttention)]
        self._codebooks = [x.quantizer.codebook for x in attentions if isinstance(x, VQAttention)]
        self._state: DecodeState | None = None
        if self._codebooks:
            self._state = DecodeState.of(state.detach().vq_layers, self._codebooks, state_dtype)
        self._layers: list[_VQLayer | _FullLayer] = []
        for i, (layer, of_layer) in enumerate(zip(attentions, states, strict=True)):
            if isinstance(layer, VQAttention) and isinstance(of_layer, VQState):
                self._layers.append(_VQLayer(layer, of_layer, i))
            elif isinstance(layer, FullAttention) and isinstance(of_layer, FullState):
                self._layers.append(_FullLayer(layer, of_layer, room))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token per row. tokens: [b] -> logits of the next token: [b, vocab_size]."""
        if self._by_forward is not None:
            with evaluating(self.model):
                output: ModelOutput = self.model(tokens.unsqueeze(1), self._by_forward)
            self._by_forward = output.state
            return output.logits[:, 0]
        x = self.model.embed(tokens.long())
        if self.model.positions is not None:
            x = x + self.model.positions(self._position)
        step = None if self._state is None else Step.start_(self._state)
        layers = iter(self._layers)
        for branch in self.model.branches:
            if isinstance(branch, VQAttention | FullAttention):
                x = x + next(layers).step(x, step)
            else:
                x = x + branch(x)
        self._position += 1
        return self.model.logits(self.model.finish(x))

    @torch.no_grad()
    def write_row_(self, row: int, state: ModelState) -> None:
        """Replace the state of one row by another state of one row; VQ attention only."""
        if self._by_forward is not None:
            self._by_forward = self._by_forward.with_row(row, state.detach())
            return
        assert self._state is not None
        self._position[row] = state.position[0]
        self._state.write_row_(row, state.detach().vq_layers, self._codebooks)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that stay at their addresses: constants, and the state of VQ layers."""
        if self._by_forward is not None:
            raise UserError("compiled decoding is for position='xl' without gains of norms only")
        yield self._position
        if self._state is not None:
            yield from self._state.tensors()
        for layer in self._layers:
            if isinstance(layer, _VQLayer):
                yield from layer.tensors()

    def state(self) -> ModelState:
        """Return a copy of the state, for `forward` or another decoder."""
        if self._by_forward is not None:
            return self._by_forward
        if self._state is not None:
            return ModelState(self._state.states(self._codebooks, self._dtype))
        full = [layer for layer in self._layers if isinstance(layer, _FullLayer)]
        return ModelState(tuple(layer.state() for layer in full))


def _has_constants(config: ModelConfig) -> bool:
    """Return whether `_VQLayer` or `_FullLayer` computes the layers of a model."""
    is_plain = config.qk_norm and not config.norm_gain and config.norm_eps == NORM_EPS
    return config.position == "xl" and (is_plain or config.attention == "full")


class _VQLayer:
    """One VQ attention branch with its constants precomputed."""

    @torch.no_grad()
    def __init__(self, attention: VQAttention, state: VQState, number: int) -> None:
        self.attention, self.number, self.attend_one_ = attention, number, attend_one_
        a = attention
        if a.backend == "triton":
            triton.check_device(a.u.device)
            from transformer_vq.ops.triton import decode

            self.attend_one_ = decode.attend_one_
        exact = accumulation_dtype(a.u.dtype)
        self.n_code = a.quantizer.codebook.shape[1]
        self.codebook = a.quantizer.codebook.to(exact)
        self.u = a.content_bias.to(exact) * a.d_k**-0.25
        self.floors = _floor(a.config.d_model, self.u), _floor(a.d_k, self.u)
        self.weight = self._merged_weight()
        # One product gives the scores of queries and keys with codewords and with distances. Their
        # norm has no factor sqrt(d_k), see `_unit`; the table has it, and the scale of q and k.
        r = a.relative_keys(a.sinusoids(state, 1)).to(exact)
        factor = a.d_k**0.5 * a.d_k**-0.25
        table = torch.cat([self.codebook, r], dim=1) * factor
        self.table = table.mT.contiguous()  # [h, k, S + d]
        position_bias = a.position_bias.to(exact) * a.d_k**-0.25
        of_queries = torch.cat([self.u @ self.codebook.mT, position_bias @ r.mT], dim=-1)
        # The nearest codeword has the largest k . c - |c|^2 / 2.
        half_norms = self.codebook.square().sum(-1, keepdim=True).mT / 2
        of_keys = F.pad(-half_norms, (0, r.shape[1]))
        self.constant = torch.cat([of_queries, of_keys], dim=1)  # [h, g + 1, S + d]

    def _merged_weight(self) -> Tensor | None:
        """Merge the input projections, unless some must be called, as with adapters.

        Columns are in the order of use: for each head its queries and its key, then values and
        gates. A product with one row reads a matrix of this layout faster than its transpose.
        """
        a = self.attention
        projections = [x for x in (a.q_proj, a.k_proj, a.v_proj, a.g_proj) if x is not None]
        if not all(map(is_plain, projections)):
            return None
        q, k, *others = (projection.weight for projection in projections)
        qk = torch.cat([x.unflatten(0, (a.n_kv_head, -1)) for x in (q, k)], dim=1)
        weight = torch.cat([qk.flatten(0, 1), *others])
        return (weight * a.config.d_model**0.5 if a.config.norm_input else weight).mT.contiguous()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the constants of the layer, except for parameters of the model."""
        yield from (x for x in vars(self).values() if isinstance(x, Tensor))
        yield from self.floors

    def step(self, x: Tensor, step: Step | None) -> Tensor:
        """Return the residual branch. x: [b, d_model], same shape as the result."""
        assert step is not None
        a = self.attention
        qk, v, gate = self._project(x)
        is_autocast = torch.is_autocast_enabled(x.device.type)
        with full_precision(x.device) if is_autocast else nullcontext():
            token = self._token(qk.to(self.table.dtype), v, needs_keys=step.state.k is not None)
            wv = self.attend_one_(token, self.number, step).flatten(1)
        if gate is not None:
            wv = wv.to(gate.dtype) * gate
        output: Tensor = a.o_proj(wv.to(v.dtype))
        return output

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries and keys, [b, h, g + 1, k], values, [b, h, v], and the gates."""
        a = self.attention
        width = a.n_kv_head * (a.n_group + 1) * a.d_k
        if self.weight is None:
            x = a.norm(x)
            q = a.q_proj(x).unflatten(-1, (a.n_kv_head, a.n_group, a.d_k))
            k = a.k_proj(x).unflatten(-1, (a.n_kv_head, 1, a.d_k))
            qk, v = torch.cat([q, k], dim=2), a.v_proj(x)
            gate = None if a.g_proj is None else F.silu(a.g_proj(x))
            v = v if gate is None else F.silu(v)
        else:
            x = _unit(x, self.floors[0]) if a.config.norm_input else x
            projected = x @ self.weight
            qk = projected[:, :width].view(len(x), a.n_kv_head, a.n_group + 1, a.d_k)
            v, gate = projected[:, width:], None
            if a.g_proj is not None:
                v, gate = F.silu(v).split([a.n_kv_head * a.d_v, a.d_v], dim=-1)
        return qk, v.unflatten(-1, (a.n_kv_head, a.d_v)), gate

    def _token(self, qk: Tensor, v: Tensor, needs_keys: bool) -> Token:
        """Quantize the key, and compute all scores of the query."""
        b, h, n, k = qk.shape  # n = g + 1
        unit = _unit(qk, self.floors[1])
        by_head = unit.transpose(0, 1).reshape(h, b * n, k)
        scores = torch.bmm(by_head, self.table).view(h, b, n, -1) + self.constant.unsqueeze(1)
        scores = scores.transpose(0, 1)  # [b, h, g + 1, S + L + 1]
        z = scores[:, :, -1, : self.n_code].argmax(-1)
        of_query = scores[:, :, :-1]
        code_scores, position_scores = of_query[..., : self.n_code], of_query[..., self.n_code :]
        if not needs_keys:
            return Token(code_scores, position_scores, z, v)
        q = unit[:, :, :-1] * k**0.25 + self.u
        return Token(code_scores, position_scores, z, v, q, lookup(self.codebook, z))


def _floor(width: int, like: Tensor) -> Tensor:
    """Return what the epsilon of RMSNorm adds to a norm, as a leg of a right triangle."""
    return torch.full((), math.sqrt(width * NORM_EPS), dtype=like.dtype, device=like.device)


def _unit(x: Tensor, floor: Tensor) -> Tensor:
    """Return rms_norm(x) / sqrt(d) in few operations, in the dtype of `floor` or better."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=floor.dtype)
    return (x / torch.hypot(norm, floor)).to(x.dtype)


class _FullLayer:
    """One full attention branch with memory for new tokens."""

    @torch.no_grad()
    def __init__(self, attention: FullAttention, state: FullState, room: int) -> None:
        self.attention = attention
        self.r = attention.relative_keys(attention.sinusoids(state, room))
        self.length, self.position = state.k.shape[-2], state.position.clone()
        self.keys, self.values = (F.pad(x, (0, 0, 0, room)) for x in (state.k, state.v))

    def step(self, x: Tensor, step: Step | None) -> Tensor:
        """Return the residual branch. x: [b, d_model], same shape as the result."""
        a = self.attention
        if self.length == self.keys.shape[-2]:
            raise ValueError(f"no room for token {self.length + 1}; give the decoder more `room`")
        x_tilde = a.norm(x).unsqueeze(1)
        q_content, q_position = a.queries(x_tilde)
        k, v = a.keys_and_values(x_tilde)
        self.keys[..., self.length : self.length + 1, :] = k
        self.values[..., self.length : self.length + 1, :] = v
        self.length += 1
        self.position += 1
        bias = q_position @ self.r[:, None, -self.length :].mT
        slots = torch.arange(self.length, device=k.device)
        empty = slots < self.length - self.position.unsqueeze(-1)  # [b, j]
        bias = bias.masked_fill(empty[:, None, None, None], -torch.inf)
        keys, values = (y[..., : self.length, :] for y in (self.keys, self.values))
        wv = quadratic_attention(q_content, keys, values, bias)
        return a.residual(wv, x_tilde).squeeze(1)

    def state(self) -> FullState:
        """Return a copy of the state."""
        k, v = (x[..., : self.length, :].clone() for x in (self.keys, self.values))
        return FullState(k, v, self.position.clone())
