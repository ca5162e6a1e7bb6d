"""Decoding in place: the same function as `TransformerVQ.forward`, one token per row and call.

Everything that depends only on weights is computed once: codebooks, projected sinusoids, and one
matrix for all input projections of a layer. With quantized keys the state does not grow, so every
token costs the same; full attention preallocates memory for the new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import is_plain, rms_norm
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.projections import AttentionLayer
from transformer_vq.nn.quantizer import nearest_code
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.decode import Ring, attend_one_
from transformer_vq.ops.inputs import AttentionInputs
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.state import AttentionState


class Decoder:
    """A model that continues from a copy of a state, without dropout and gradients.

    room: maximum number of new tokens; needed for full attention only, whose state grows.
    """

    def __init__(self, model: TransformerVQ, state: ModelState, room: int = 0) -> None:
        self.model = model
        self._position = state.position.clone()
        states = iter(state.detach().layers)
        self._layers: dict[int, _Layer] = {}
        for i, branch in enumerate(model.branches):
            if isinstance(branch, VQAttention):
                self._layers[i] = _VQLayer(branch, next(states))
            elif isinstance(branch, FullAttention):
                self._layers[i] = _FullLayer(branch, next(states), room)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token per row. tokens: [b] -> logits of the next token: [b, vocab_size]."""
        x = self.model.embed(tokens.long())
        if self.model.positions is not None:
            x = x + self.model.positions(self._position)
        for i, branch in enumerate(self.model.branches):
            layer = self._layers.get(i)
            x = x + (branch(x) if layer is None else layer.step(x))
        self._position += 1
        return self.model.logits(self.model.finish(x))

    def write_row_(self, row: int, state: ModelState) -> None:
        """Replace the state of one row by another state of one row; VQ attention only."""
        self._position[row] = state.position[0]
        for layer, part in zip(self._layers.values(), state.detach().layers, strict=True):
            layer.write_row_(row, part)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that stay at their addresses: constants, and the state of VQ layers."""
        yield self._position
        for layer in self._layers.values():
            yield from layer.tensors()

    def state(self) -> ModelState:
        """Return a copy of the state, for `forward` or another decoder."""
        return ModelState(tuple(layer.state() for layer in self._layers.values()))


class _Layer:
    """One attention branch with its constants precomputed."""

    @torch.no_grad()
    def __init__(self, attention: AttentionLayer, state: AttentionState, room: int) -> None:
        self.attention = attention
        gates = [] if attention.g_proj is None else [attention.g_proj]
        self.projections = [attention.q_proj, attention.k_proj, attention.v_proj, *gates]
        self.weight: Tensor | None = None
        """All input projections as one matrix; None if some must be called, as with adapters."""
        if all(is_plain(projection) for projection in self.projections):
            weights = [projection.weight for projection in self.projections]
            self.weight, self.widths = torch.cat(weights), [len(weight) for weight in weights]
        self.r = attention.relative_keys(attention.sinusoids(state, room))
        heads = (attention.n_kv_head, attention.n_group, attention.d_k)
        self.u, self.v = attention.u.view(heads), attention.v.view(heads)

    def step(self, x: Tensor) -> Tensor:
        """Return the residual branch. x: [b, d_model], same shape as the result."""
        a = self.attention
        q, k, v, *gate = self._project(a.norm(x))
        q = rms_norm(q.unflatten(-1, (a.n_kv_head, a.n_group, a.d_k)))
        k = rms_norm(k.unflatten(-1, (a.n_kv_head, a.d_k))) * a.d_k**-0.25
        v = v.unflatten(-1, (a.n_kv_head, a.d_v))
        v = F.silu(v) if gate else v
        q_content, q_position = ((q + bias) * a.d_k**-0.25 for bias in (self.u, self.v))
        wv = self.attend(q_content, q_position, k, v).flatten(1)
        output: Tensor = a.o_proj(wv * F.silu(gate[0]) if gate else wv)
        return output

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        if self.weight is None:
            return [projection(x) for projection in self.projections]
        return torch.split(F.linear(x, self.weight), self.widths, dim=-1)

    def attend(self, q_content: Tensor, q_position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend and advance the state. q_*: [b, h, g, k], k: [b, h, k], v: [b, h, v]."""
        raise NotImplementedError

    def write_row_(self, row: int, state: AttentionState) -> None:
        """Replace one row of the state."""
        raise NotImplementedError

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the layer, except for parameters of the model."""
        yield from (x for x in vars(self).values() if isinstance(x, Tensor))

    def state(self) -> AttentionState:
        """Return a copy of the state."""
        raise NotImplementedError


class _VQLayer(_Layer):
    def __init__(self, attention: VQAttention, state: AttentionState) -> None:
        super().__init__(attention, state, room=1)
        self.ring = Ring.of(state)
        self.codebook = attention.quantizer.codebook.to(accumulation_dtype(attention.u.dtype))
        n_head, n_code, _ = self.codebook.shape
        self.first_code = n_code * torch.arange(n_head, device=state.k.device)

    def attend(self, q_content: Tensor, q_position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = nearest_code(k.to(self.codebook.dtype).unsqueeze(-2), self.codebook).squeeze(-1)
        codebook = self.codebook.to(k.dtype)
        k_hat = F.embedding(z + self.first_code, codebook.flatten(0, 1))
        by_distance = q_position @ self.r.mT
        inputs = AttentionInputs(q_content, k_hat, z, v, codebook, by_distance)
        return attend_one_(inputs, self.ring)

    def write_row_(self, row: int, state: AttentionState) -> None:
        self.ring.write_row_(row, state)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self.ring.tensors()

    def state(self) -> AttentionState:
        return self.ring.state()


class _FullLayer(_Layer):
    def __init__(self, attention: FullAttention, state: AttentionState, room: int) -> None:
        super().__init__(attention, state, room)
        self.length, self.position = state.k.shape[-2], state.position.clone()
        self.keys, self.values = (F.pad(x, (0, 0, 0, room)) for x in (state.k, state.v))

    def attend(self, q_content: Tensor, q_position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.length == self.keys.shape[-2]:
            raise ValueError(f"no room for token {self.length + 1}; give the decoder more `room`")
        self.keys[..., self.length, :] = k
        self.values[..., self.length, :] = v
        self.length += 1
        self.position += 1
        bias = q_position @ self.r[:, -self.length :].mT
        slots = torch.arange(self.length, device=k.device)
        empty = slots < self.length - self.position.unsqueeze(-1)  # [b, j]
        bias = bias.masked_fill(empty[:, None, None], -torch.inf).unsqueeze(-2)
        keys, values = (x[..., : self.length, :] for x in (self.keys, self.values))
        return quadratic_attention(q_content.unsqueeze(-2), keys, values, bias).squeeze(-2)

    def state(self) -> AttentionState:
        k, v = (x[..., : self.length, :].clone() for x in (self.keys, self.values))
        return AttentionState(k, v, self.position.clone())
