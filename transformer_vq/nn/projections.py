"""The base of all attention layers: projections, heads, positional scores and input checks.

There are h key/value heads with g query heads each. SHGA has h = g = 1, wide values and a gate;
MQA has h = 1, MHA has g = 1, and GQA any h and g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_vq.config import AttentionConfig, Heads
from transformer_vq.nn.layers import gated, is_plain, linear, rms_norm
from transformer_vq.nn.quantizer import CodeUsage
from transformer_vq.ops.inputs import split
from transformer_vq.ops.position import (
    relative_sinusoids,
    scores_by_distance,
    scores_of_few_queries,
    with_few_queries,
)
from transformer_vq.ops.ragged import Packing, read_packing
from transformer_vq.ops.state import AttentionState
from transformer_vq.ops.tree import tensor_tree

T = TypeVar("T")


@tensor_tree
@dataclass(frozen=True)
class AttentionOutput:
    """The output of an attention layer.

    y: [b, t, d_model] the residual branch, state: the state after this segment, code_usage: the
    codebook statistics of this batch, None for full attention and, in evaluation mode, without
    gradients.
    """

    y: Tensor
    state: AttentionState
    commit_loss: Tensor
    code_usage: CodeUsage | None


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of an attention layer, with defaults filled in and padding moved to the end.

    x: [b, t, d_model], sinusoids: [d, d_model], key_priority: [b, t].
    """

    x: Tensor
    sinusoids: Tensor
    packing: Packing | None
    key_priority: Tensor | None
    is_gathered: bool
    """Whether the caller has moved the padding to the end, and expects it there."""
    n_blocks: int | None = None
    """Number of blocks, if the length is symbolic."""

    def split(self, lens: Sequence[int]) -> list[LayerInputs]:
        """Return consecutive segments with these lengths."""
        if len(lens) == 1:
            return [self]
        n, priority = len(lens), self.key_priority
        packings = [None] * n if self.packing is None else self.packing.split(lens)
        priorities = [None] * n if priority is None else split(priority, lens, 1)
        return [
            replace(self, x=x, packing=packing, key_priority=priority)
            for x, packing, priority in zip(
                split(self.x, lens, 1), packings, priorities, strict=True
            )
        ]

    def finish(self, output: AttentionOutput) -> AttentionOutput:
        """Undo `gather`, and record the current document in the state."""
        if self.packing is None:
            return output
        y = output.y if self.is_gathered else self.packing.scatter(output.y)
        state = replace(output.state, document=self.packing.document)
        return replace(output, y=y, state=state)


class AttentionLayer(nn.Module):
    """Projections and interface; subclasses implement `forward` and `init_state`."""

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
        # Vectors, not one row per head: optimizers treat parameters by their number of axes.
        self.u = nn.Parameter(torch.zeros(n_head * self.d_k))
        self.v = nn.Parameter(torch.zeros(n_head * self.d_k))

    def set_heads(self, heads: Heads) -> None:
        """Set the head geometry of this rank: a shard of the config's with tensor parallelism."""
        self.heads = heads
        self.n_kv_head, self.n_group = heads.n_kv_head, heads.n_group
        self.d_k, self.d_v = heads.d_k, heads.d_v

    def init_state(self, batch_size: int, device: torch.device | None = None) -> AttentionState:
        """Return the state before the first token of `batch_size` sequences."""
        raise NotImplementedError

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        """Return the largest distance that has a positional score."""
        raise NotImplementedError

    def symbolic_blocks(self, seq_len: int) -> int | None:
        """Return the number of blocks if the length is symbolic (torch.export), otherwise None."""
        return None

    def sinusoids(self, state: AttentionState, seq_len: int) -> Tensor:
        """Return the sinusoids of all distances of a segment; layers of one shape share them."""
        return relative_sinusoids(
            self.max_distance(state, seq_len),
            self.config.d_model,
            self.config.pe_wavelength,
            self.u.dtype,
            state.k.device,
        )

    def relative_keys(self, table: Tensor) -> Tensor:
        """Return r, the projected sinusoids. table: [d, d_model] -> [h, d, k]."""
        projected: Tensor = self.r_proj(table)
        r: Tensor = projected.unflatten(-1, (self.n_kv_head, self.d_k)) * self.d_k**-0.25
        return r.transpose(0, 1)

    def _start(
        self,
        x: Tensor,
        state: AttentionState | None,
        valid: Tensor | None,
        document_ids: Tensor | None,
        packing: Packing | None,
        sinusoids: Tensor | None,
        key_priority: Tensor | None,
    ) -> tuple[LayerInputs, AttentionState]:
        """Check the arguments of `forward`, and fill in defaults."""
        self._check(x, state)
        state = self.init_state(x.shape[0], x.device) if state is None else state
        if sinusoids is None:
            sinusoids = self.sinusoids(state, x.shape[1])
        is_gathered = packing is not None
        if packing is None:
            packing = read_packing(state, x.shape[1], valid, document_ids)
        if packing is not None and not is_gathered:
            x = packing.gather(x)
            key_priority = None if key_priority is None else packing.gather(key_priority)
        return LayerInputs(x, sinusoids, packing, key_priority, is_gathered), state

    def _checkpointed(self, fn: Callable[..., T]) -> Callable[..., T]:
        """Return `fn`, with activation checkpointing if it is on."""
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return fn
        return lambda *args: checkpoint(fn, *args, use_reentrant=False)

    def norm(self, x: Tensor) -> Tensor:
        """Return x_tilde, the normalized input of the layer."""
        return rms_norm(x) if self.config.norm_input else x

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries for content, q + u, and for position, q + v: [b, h, g, t, k] each."""
        q = self.q_proj(x).unflatten(-1, (self.n_kv_head, self.n_group, self.d_k))
        q = rms_norm(q).permute(0, 2, 3, 1, 4)
        u, v = (x.view(self.n_kv_head, self.n_group, 1, self.d_k) for x in (self.u, self.v))
        return (q + u) * self.d_k**-0.25, (q + v) * self.d_k**-0.25

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return k: [b, h, t, k] and v: [b, h, t, v]."""
        k = self.k_proj(x).unflatten(-1, (self.n_kv_head, self.d_k)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_head, self.d_v)).transpose(1, 2)
        return rms_norm(k) * self.d_k**-0.25, v if self.g_proj is None else F.silu(v)

    def residual(self, wv: Tensor, x: Tensor) -> Tensor:
        """Apply the gate, if any, and the output projection. wv: [b, h, g, t, v]."""
        o = wv.permute(0, 3, 1, 2, 4).flatten(2)
        y: Tensor = self.o_proj(o if self.g_proj is None else gated(o, self.g_proj(x)))
        return y

    def by_distance(self, q: Tensor, sinusoids: Tensor, mask: Tensor | None) -> Tensor:
        """Return the positional scores of each query for each distance: [b, h, g, t, d]."""
        table = sinusoids if mask is None else sinusoids * mask / (1 - self.config.p_dropsin)
        table = table.to(q.dtype)
        if with_few_queries(q, table) and is_plain(self.r_proj):  # decoding
            weight = self.r_proj.weight.unflatten(0, (self.n_kv_head, self.d_k))
            return scores_of_few_queries(q, weight * self.d_k**-0.25, table)
        return scores_by_distance(q, self.relative_keys(table))

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
                f"state has a batch size of {state.k.shape[0]}, input has {x.shape[0]} rows; "
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
                    f"state comes from another model: its {name} have shape {got[name]} per row, "
                    f"this layer needs {want[name]}; start from init_state(batch_size)"
                )

    def _state_shapes(self, window_len: int) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of a state of this layer, without the batch."""
        return {
            "keys": (self.n_kv_head, window_len, self.d_k),
            "values": (self.n_kv_head, window_len, self.d_v),
            "codes": None,
            "cache": None,
        }

    def _empty_state(
        self, batch_size: int, window_len: int, device: torch.device | None, **options: Any
    ) -> AttentionState:
        # Only parameters of this module are used: those of others may be offloaded or quantized.
        shape = (batch_size, self.n_kv_head, window_len, self.d_k, self.d_v)
        device = self.u.device if device is None else device
        return AttentionState.empty(*shape, dtype=self.u.dtype, device=device, **options)
