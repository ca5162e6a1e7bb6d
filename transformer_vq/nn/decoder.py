"""Decoding in place: the same function as `TransformerVQ.forward`, one token per row and call.

What depends on weights alone is worked out once: codebooks, projected sinusoids, and one matrix for
all projections of a layer. The state is changed in place and does not grow, so a token costs the
same at any position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.layers import rms_norm
from transformer_vq.nn.model import ModelState, TransformerVQ
from transformer_vq.nn.quantizer import nearest_code
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.decode import Ring, attend_one_
from transformer_vq.ops.state import AttentionState


class Decoder:
    """A model that goes on from a state, which it copies; in evaluation, without gradients."""

    def __init__(self, model: TransformerVQ, state: ModelState) -> None:
        if model.config.attention == "full":
            raise ValueError("full attention has no state of constant size; use forward")
        self.model = model
        self._position = state.position.clone()
        states = iter(state.layers)
        self._layers = {
            i: _Layer(branch, next(states))
            for i, branch in enumerate(model.branches)
            if isinstance(branch, VQAttention)
        }

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens: [b] -> logits of the next token: [b, vocab_size]."""
        x = self.model.embed(tokens.long())
        if self.model.positions is not None:
            x = x + self.model.positions(self._position)
        for i, branch in enumerate(self.model.branches):
            layer = self._layers.get(i)
            x = x + (branch(x) if layer is None else layer.step(x))
        self._position += 1
        return self.model.logits(x)

    def state(self) -> ModelState:
        """Where each row stands, for `forward` or for another decoder."""
        return ModelState(tuple(layer.ring.state() for layer in self._layers.values()))


class _Layer:
    """One attention branch with everything that does not change worked out."""

    @torch.no_grad()
    def __init__(self, attention: VQAttention, state: AttentionState) -> None:
        self.attention = attention
        self.ring = Ring.of(state)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        if attention.g_proj is not None:
            projections.append(attention.g_proj)
        self.weight = torch.cat([projection.weight for projection in projections])
        self.widths = [projection.weight.shape[0] for projection in projections]
        self.codebook = attention.quantizer.codebook  # [h, s, k]
        r_weight = attention.r_proj.weight.unflatten(0, (attention.n_head, attention.d_k))
        table = attention.sinusoids(state, 1)
        self.r = torch.einsum("dw,hkw->hdk", table, r_weight * attention.d_k**-0.25)
        heads = (attention.n_head, attention.n_group, attention.d_k)
        self.u, self.v = attention.u.view(heads), attention.v.view(heads)

    def step(self, x: Tensor) -> Tensor:
        """x: [b, d_model] -> the residual branch, same shape."""
        a = self.attention
        q, k, v, *gate = F.linear(rms_norm(x), self.weight).split(self.widths, dim=-1)
        q = rms_norm(q.unflatten(-1, (a.n_head, a.n_group, a.d_k)))
        k = rms_norm(k.unflatten(-1, (a.n_head, a.d_k))) * a.d_k**-0.25
        v = v.unflatten(-1, (a.n_head, a.d_v))
        v = F.silu(v) if gate else v
        exact = accumulation_dtype(k.dtype)
        codebook = self.codebook.to(exact)
        z = nearest_code(k.to(exact).unsqueeze(-2), codebook).squeeze(-1)  # [b, h]
        heads = torch.arange(a.n_head, device=z.device)
        by_distance = torch.einsum("bhgk,hdk->bhgd", (q + self.v) * a.d_k**-0.25, self.r)
        wv = attend_one_(
            (q + self.u) * a.d_k**-0.25,
            codebook[heads, z].to(k.dtype),
            z,
            v,
            codebook.to(k.dtype),
            by_distance,
            self.ring,
        ).flatten(1)
        return a.o_proj(wv * F.silu(gate[0]) if gate else wv)
