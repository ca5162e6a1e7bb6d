"""The strongest PyTorch baseline: MHA with `scaled_dot_product_attention`.

It has the shape of our MHA layer and as few other operations as possible: no positional bias, no
normalization of queries and keys, and one projection for queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_vq.config import ModelConfig
from transformer_vq.errors import UserError
from transformer_vq.nn.layers import FeedForward, linear, rms_norm
from transformer_vq.nn.model import ModelOutput, TransformerVQ, last_columns
from transformer_vq.nn.state import ModelState
from transformer_vq.training.sizes import flops_per_token


class SdpaAttention(nn.Module):
    """RMSNorm, causal multi-head attention with heads of width d_k, output projection."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k
        self.checkpoint_activations = False
        self.qkv_proj = linear(d_model, 3 * d_model)
        self.o_proj = linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual branch of x: [b, t, d_model] -> [b, t, d_model]."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            branch: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return branch
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(rms_norm(x)).unflatten(-1, (3, -1, self.d_k))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [b, h, t, k] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        branch: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return branch


class SdpaTransformer(TransformerVQ):
    """A plain transformer without state; trainable like `TransformerVQ`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, head_type="mha", attention="full"))
        self.branches = nn.ModuleList(
            branch
            for _ in range(config.n_layer)
            for branch in (
                SdpaAttention(config.d_model, config.d_k),
                FeedForward(config.d_model, 4 * config.d_model),
            )
        )

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_priority: Tensor | None = None,
        *,
        n_logits: int | None = None,
    ) -> ModelOutput:
        """Return the logits of tokens: [b, t]; the returned state is empty.

        `state` and `key_priority` are ignored: this model has no window, cache or codebooks.
        """
        if valid is not None or document_ids is not None:
            raise UserError("the sdpa baseline does not support padding or documents")
        x = self.embed(tokens)
        for branch in self.branches:
            x = x + branch(x)
        features = x if n_logits is None else last_columns(x, n_logits)
        return ModelOutput(
            self.logits(features), self.init_state(len(tokens)), torch.zeros_like(x[0, 0, 0]), ()
        )


def sdpa_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of a forward pass: those of full MHA without the positional bias."""
    full = flops_per_token(replace(config, head_type="mha", attention="full"), seq_len)
    return full - config.n_layer * config.d_model * 2 * (seq_len // 2)
