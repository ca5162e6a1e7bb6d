"""Attention layers (Definition 3.1): quantized keys in linear time, plain keys in quadratic time.

There are h key/value heads with g query heads each. SHGA has h = g = 1, wide values and a gate;
MQA has h = 1, MHA has g = 1, and GQA any h and g. Scores are (q + u) . k for all keys plus, within
the range of the positional bias, (q + v) . r of the distance, as in Transformer-XL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_vq.config import AttentionConfig, Backend, Heads, Reduction
from transformer_vq.errors import UserError
from transformer_vq.nn.layers import RMSNorm, draw_keep, gated, is_plain, linear, local
from transformer_vq.nn.quantizer import CodeUsage, FindCode, VectorQuantizer, token_priority
from transformer_vq.ops import packing as pack
from transformer_vq.ops import position, triton
from transformer_vq.ops.blockwise import attend_segment
from transformer_vq.ops.packing import AttentionInputs, Packing
from transformer_vq.ops.quadratic import quadratic_attention
from transformer_vq.ops.reductions import check_method
from transformer_vq.ops.runtime import execution_on, tensor_tree
from transformer_vq.ops.state import AttentionState, FullState, RotaryState, VQState

T = TypeVar("T")
State = TypeVar("State", bound=AttentionState)


@tensor_tree
@dataclass(frozen=True)
class AttentionOutput(Generic[State]):
    """The output of an attention layer.

    y: [b, t, d_model] the residual branch, state: after this segment, code_usage: the codebook
    statistics of this batch, None for full attention and, in evaluation mode, without gradients.
    """

    y: Tensor
    state: State
    commit_loss: Tensor
    code_usage: CodeUsage | None


class AttentionLayer(nn.Module, Generic[State]):
    """Projections and `forward`; subclasses implement how a segment is attended to."""

    def __init__(self, config: AttentionConfig, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.set_heads(config.heads)
        d_model, n_head, n_kv_head = config.d_model, config.heads.n_head, config.heads.n_kv_head
        has_bias = config.proj_bias != "none"
        self.input_norm, self.q_norm, self.k_norm = (
            RMSNorm(width, config.norm_gain, config.norm_eps) if is_used else nn.Identity()
            for width, is_used in (
                (d_model, config.norm_input),
                (self.d_k, config.qk_norm),
                (self.d_k, config.qk_norm),
            )
        )
        self.q_proj = linear(d_model, n_head * self.d_k, has_bias)
        self.k_proj = linear(d_model, n_kv_head * self.d_k, has_bias)
        self.v_proj = linear(d_model, n_kv_head * self.d_v, has_bias)
        self.g_proj = linear(d_model, self.d_v) if config.heads.is_gated else None
        if config.position == "xl":
            self.r_proj = linear(d_model, n_kv_head * self.d_k)
        self.o_proj = linear(n_head * self.d_v, d_model, config.proj_bias == "all")
        if config.position == "rope":
            return
        # The biases of queries, with the paper's names. Vectors, not one row per head: optimizers
        # treat parameters by their number of axes.
        self.u = nn.Parameter(torch.zeros(n_head * self.d_k))
        self.v = nn.Parameter(torch.zeros(n_head * self.d_k))

    def set_heads(self, heads: Heads) -> None:
        """Set the head geometry of this rank: a shard of the config's with tensor parallelism."""
        self.heads = heads
        self.n_kv_head, self.n_group = heads.n_kv_head, heads.n_group
        self.d_k, self.d_v = heads.d_k, heads.d_v

    @property
    def like(self) -> Tensor:
        """A parameter with the dtype and device of the layer; projections may be quantized."""
        return self.u if self.config.position == "xl" else self.k_proj.weight

    @property
    def content_bias(self) -> Tensor:
        """The parameter u, added to queries for content: [h, g, k]."""
        return local(self.u).view(self.n_kv_head, self.n_group, self.d_k)

    @property
    def position_bias(self) -> Tensor:
        """The parameter v, added to queries for positions: [h, g, k]."""
        return local(self.v).view(self.n_kv_head, self.n_group, self.d_k)

    def init_state(self, batch_size: int, device: torch.device | None = None) -> State:
        """Return the state before the first token of `batch_size` sequences."""
        raise NotImplementedError

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        """Return the largest distance that has a positional score."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        packing: Packing | None = None,
        sinusoids: Tensor | None = None,
        key_priority: Tensor | None = None,
    ) -> AttentionOutput[State]:
        """Attend within the next segment of each sequence, and to all earlier ones.

        x: [b, t, d_model] with any t >= 1, state: as returned for the previous segment.
        valid: [b, t], False for padding, which may be anywhere; it is ignored, and its output is
        zero. document_ids: [b, t]; tokens attend within their document only.
        key_priority: [b, t] of int64, which keys may become codes; see `VectorQuantizer.forward`.
        packing, sinusoids: from a model, which computes them once for all its layers and has
        checked the state; x and key_priority are then in the order of `Packing.gather`.
        """
        state = self.init_state(x.shape[0], x.device) if state is None else state
        if sinusoids is None:
            if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.config.d_model:
                want = f"[batch, tokens >= 1, {self.config.d_model}]"
                raise ValueError(f"input has shape {tuple(x.shape)}, want {want}")
            self.check_state(state, x.shape[0])
            sinusoids = self.sinusoids(state, x.shape[1])
        is_gathered = packing is not None
        if packing is None:
            packing = pack.read_packing(state, x.shape[1], valid, document_ids)
        if packing is not None and not is_gathered:
            x = packing.gather(x)
            key_priority = None if key_priority is None else packing.gather(key_priority)
        output = self._attend(x, packing, key_priority, state, sinusoids)
        if packing is None:
            return output
        y = output.y if is_gathered else packing.scatter(output.y)
        return replace(output, y=y, state=replace(output.state, document=packing.document))

    def sinusoids(self, state: AttentionState, seq_len: int) -> Tensor:
        """Return the sinusoids of all distances of a segment, farthest first: [d, d_model]."""
        distances = torch.arange(self.max_distance(state, seq_len), -1, -1, device=state.k.device)
        width, wavelength = self.config.d_model, self.config.pe_wavelength
        return position.sinusoids(distances, width, wavelength, self.u.dtype)

    def relative_keys(self, table: Tensor) -> Tensor:
        """Return r, the projected sinusoids. table: [d, d_model] -> [h, d, k]."""
        projected: Tensor = self.r_proj(table)
        r: Tensor = projected.unflatten(-1, (self.n_kv_head, self.d_k)) * self.d_k**-0.25
        return r.transpose(0, 1)

    def _attend(self, *segment: Any) -> AttentionOutput[State]:
        """Attend from one segment, with activation checkpointing if it is on."""
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return self._segment(*segment)
        output: AttentionOutput[State] = checkpoint(self._segment, *segment, use_reentrant=False)
        return output

    def _segment(self, *segment: Any) -> AttentionOutput[State]:
        """Project and attend. Arguments: x, packing, key_priority, state, sinusoids."""
        raise NotImplementedError

    def _state_shapes(self, state: AttentionState) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a state of this layer, without the batch."""
        raise NotImplementedError

    def norm(self, x: Tensor) -> Tensor:
        """Return x_tilde, the normalized input of the layer."""
        x_tilde: Tensor = self.input_norm(x)
        return x_tilde

    def plain_queries(self, x: Tensor) -> Tensor:
        """Return q, without biases and scale: [b, h, g, t, k]."""
        q = self.q_proj(x).unflatten(-1, (self.n_kv_head, self.n_group, self.d_k))
        normed: Tensor = self.q_norm(q)
        return normed.permute(0, 2, 3, 1, 4)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries for content, q + u, and for position, q + v: [b, h, g, t, k] each."""
        q = self.plain_queries(x)
        biases = self.content_bias, self.position_bias
        of_content, of_position = ((q + x.unsqueeze(2)) * self.d_k**-0.25 for x in biases)
        return of_content, of_position

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return k: [b, h, t, k] and v: [b, h, t, v]."""
        k = self.k_proj(x).unflatten(-1, (self.n_kv_head, self.d_k)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_head, self.d_v)).transpose(1, 2)
        return self.k_norm(k) * self.d_k**-0.25, v if self.g_proj is None else F.silu(v)

    def residual(self, wv: Tensor, x: Tensor) -> Tensor:
        """Apply the gate, if any, and the output projection. wv: [b, h, g, t, v]."""
        o = wv.permute(0, 3, 1, 2, 4).flatten(2)
        y: Tensor = self.o_proj(o if self.g_proj is None else gated(o, self.g_proj(x)))
        return y

    def by_distance(self, q: Tensor, sinusoids: Tensor, mask: Tensor | None) -> Tensor:
        """Return the positional scores of each query for each distance: [b, h, g, t, d]."""
        table = sinusoids if mask is None else sinusoids * mask / (1 - self.config.p_dropsin)
        table = table.to(q.dtype)
        if position.with_few_queries(q, table) and is_plain(self.r_proj):  # decoding
            weight = self.r_proj.weight.unflatten(0, (self.n_kv_head, self.d_k))
            return position.scores_of_few_queries(q, weight * self.d_k**-0.25, table)
        return torch.einsum("bhgik,hdk->bhgid", q, self.relative_keys(table))

    def check_state(self, state: AttentionState, batch_size: int) -> None:
        """Raise ValueError if a state does not fit the layer and the batch."""
        if state.k.shape[0] != batch_size:
            problem = f"state has a batch size of {len(state.k)}, the input has {batch_size} rows"
            raise ValueError(f"{problem}; use init_state(batch_size) or state.select(rows)")
        found = {"keys": state.k, "values": state.v}
        if isinstance(state, VQState):
            found["codes"] = state.z
            if state.cache is not None:
                found["cache"] = state.cache.mean
            if isinstance(state, RotaryState):
                found["slots"] = state.slots.k
        shapes = {name: tuple(x.shape[1:]) for name, x in found.items()}
        wanted = self._state_shapes(state)
        for name in ("keys", "values", "codes", "cache", "slots"):
            got, want = shapes.get(name), wanted.get(name)
            if got != want:
                problem = f"its {name} have shape {got} per row, this layer needs {want}"
                fix = "start from init_state(batch_size)"
                raise ValueError(f"state comes from another model: {problem}; {fix}")


class VQAttention(AttentionLayer[VQState]):
    """Dense causal softmax attention over quantized keys in linear time, for use in other models.

    Returns the residual branch of Definition 3.1, so a layer is `x = x + attention(x).y`. Pass the
    returned state with the next segment of the same sequences. Once per optimizer step, pass the
    returned `code_usage` to `update_codebook`.

    options: fields of `AttentionConfig`, such as head_type, n_head, n_kv_head, d_k, d_v, n_code,
    block_len and norm_input. By default one gated head (shga); with n_head=8, eight heads of width
    d_model / 8 (mha); with n_kv_head=2 as well, two key/value heads (gqa).
    reduction, backend and checkpoint_activations select how the result is computed; they do not
    change it. reduction="auto" and backend="auto": see `vq_attention`; "triton" needs the extra
    `triton` and a GPU.
    """

    def __init__(
        self,
        d_model: int,
        *,
        reduction: Reduction = "auto",
        backend: Backend = "auto",
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        config = AttentionConfig.for_layer(d_model, **options)
        if config.attention != "vq":
            raise UserError("VQAttention needs attention='vq'; use FullAttention instead")
        if config.position == "rope" and type(self) is VQAttention:
            raise UserError("VQAttention has position='xl'; use RotaryVQAttention for 'rope'")
        super().__init__(config, checkpoint_activations)
        self.set_method(reduction, backend)
        names = ("ema_decay", "codebook_init", "revive_below")
        rules: dict[str, Any] = {name: getattr(config, name) for name in names}
        rules["with_metric"] = config.position == "rope"
        self.quantizer = VectorQuantizer(config.n_code, self.d_k, self.n_kv_head, **rules)
        self.exchange: Callable[[AttentionInputs, VQState], VQState] | None = None
        """Context parallelism: in training, returns the state before this rank's shard."""

    def init_state(self, batch_size: int, device: torch.device | None = None) -> VQState:
        config = self.config
        # Only parameters of this module are used: those of others may be offloaded or quantized.
        return VQState.empty(
            *(batch_size, self.n_kv_head, config.block_len, self.d_k, self.d_v, config.n_code),
            compressive_cache=config.compressive_cache,
            dtype=self.like.dtype,
            device=self.like.device if device is None else device,
        )

    def set_method(self, reduction: Reduction, backend: Backend) -> None:
        """Set how the result is computed; raise UserError if there is no such way."""
        check_method(reduction, backend)
        if backend == "triton":
            triton.check_package()
        self.reduction, self.backend = reduction, backend

    def update_codebook(self, code_usage: CodeUsage) -> None:
        """Move the codebook toward the keys of `code_usage`; call once per optimizer step."""
        self.quantizer.update_codebook(code_usage)

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        return self.config.block_len

    def segment_len(self, batch_size: int, seq_len: int, device: torch.device | None = None) -> int:
        """Return the maximum number of tokens that the layer processes at a time.

        device: of the input; by default that of the layer.
        """
        block_len = self.config.block_len
        if self.reduction == "input_scan" and not self._is_sharded():
            return block_len
        is_auto = self.reduction == "auto" and self.backend != "triton"
        if self._is_sharded() or not is_auto:
            return seq_len
        n_scores = batch_size * self.heads.n_head * (self.config.n_code + 2 * block_len)
        execution = execution_on(self.like.device if device is None else device)
        return max(1, execution.segment_scores // (n_scores * block_len)) * block_len

    def _attend(
        self,
        x: Tensor,
        packing: Packing | None,
        key_priority: Tensor | None,
        state: VQState,
        sinusoids: Tensor,
    ) -> AttentionOutput[VQState]:
        """Cut the input into segments, and attend from one after the other."""
        state = self._with_sinusoid_mask(state)
        if key_priority is None and self.training and self.quantizer.uses_candidates:
            valid = None if packing is None else packing.valid
            key_priority = token_priority(x.shape[0], x.shape[1], valid, x.device)
        n_rows, seq_len = x.shape[:2]
        max_len = self.segment_len(n_rows, seq_len, x.device)
        lens = pack.segment_lens(seq_len, self.config.block_len, max_len)
        none = [None] * len(lens)
        packings = none if packing is None else packing.split(lens)
        priorities = none if key_priority is None else pack.split(key_priority, lens, 1)
        outputs: list[AttentionOutput[VQState]] = []
        for segment in zip(pack.split(x, lens, 1), packings, priorities, strict=True):
            outputs.append(super()._attend(*segment, state, sinusoids))
            state = outputs[-1].state
        return _join(outputs, packings)

    def _segment(
        self,
        x: Tensor,
        packing: Packing | None,
        key_priority: Tensor | None,
        state: VQState,
        sinusoids: Tensor,
    ) -> AttentionOutput[VQState]:
        """Project, quantize and attend for one segment."""
        x_tilde = self.norm(x)
        q_content, q_position = self.queries(x_tilde)
        k, v = self.keys_and_values(x_tilde)
        valid = None if packing is None else packing.valid
        quantized = self.quantizer(k, valid, key_priority, self._find_code(k.device))
        by_distance = self.by_distance(q_position, sinusoids, state.sinusoid_mask)
        segment = AttentionInputs(
            q_content, quantized.k_hat, quantized.z, v, quantized.codebook, by_distance, packing
        )
        if self.exchange is not None and self._is_sharded():
            state = self.exchange(segment, state)
        method = self.reduction, self.backend, self.config.grad_through_cache
        wv, state = attend_segment(segment, state, *method)
        y = self.residual(wv, x_tilde)
        return AttentionOutput(y, state, quantized.commit_loss, quantized.usage)

    def _find_code(self, device: torch.device) -> FindCode | None:
        """Return the kernel that finds codes, for backend="triton" only."""
        if self.backend != "triton":
            return None
        triton.check_device(device)

        from transformer_vq.ops.triton.blocks import nearest_code

        return nearest_code

    def _is_sharded(self) -> bool:
        """Return whether this rank has a shard of each sequence (context parallelism)."""
        return self.training and self.exchange is not None

    def _with_sinusoid_mask(self, state: VQState) -> VQState:
        """In training, draw a new dropout mask if all rows are at their start, else keep it."""
        if not self.training or self.config.p_dropsin == 0.0:
            return state if state.sinusoid_mask is None else replace(state, sinusoid_mask=None)
        shape = (self.config.block_len + 1, self.config.d_model)
        mask = draw_keep(shape, self.config.p_dropsin, state.k.device)
        if state.sinusoid_mask is not None:
            mask = torch.where((state.position == 0).all(), mask, state.sinusoid_mask)
        return replace(state, sinusoid_mask=mask)

    def _state_shapes(self, state: AttentionState) -> dict[str, tuple[int, ...]]:
        h, n = self.n_kv_head, self.config.block_len
        shapes = {"keys": (h, n, self.d_k), "values": (h, n, self.d_v), "codes": (h, n)}
        cache = {"cache": (h, self.config.n_code, self.d_v)}
        return shapes | cache if self.config.compressive_cache else shapes


class FullAttention(AttentionLayer[FullState]):
    """The quadratic baseline: the same layer with plain keys and no limit on the distance."""

    def __init__(
        self, d_model: int, *, checkpoint_activations: bool = False, **options: Any
    ) -> None:
        config = AttentionConfig.for_layer(d_model, **{"attention": "full", **options})
        super().__init__(config, checkpoint_activations)

    def init_state(self, batch_size: int, device: torch.device | None = None) -> FullState:
        device = self.like.device if device is None else device
        k, v = (
            torch.zeros(batch_size, self.n_kv_head, 0, width, dtype=self.like.dtype, device=device)
            for width in (self.d_k, self.d_v)
        )
        return FullState(k, v, torch.zeros(batch_size, dtype=torch.int64, device=device))

    def max_distance(self, state: AttentionState, seq_len: int) -> int:
        return state.k.shape[-2] + seq_len - 1

    def _segment(
        self,
        x: Tensor,
        packing: Packing | None,
        key_priority: Tensor | None,
        state: FullState,
        sinusoids: Tensor,
    ) -> AttentionOutput[FullState]:
        x_tilde = self.norm(x)
        q_content, q_position = self.queries(x_tilde)
        k, v = self.keys_and_values(x_tilde)
        n_past, seq_len = state.k.shape[-2], x.shape[1]
        k_all = torch.cat([state.k.to(k.dtype), k], dim=-2)
        v_all = torch.cat([state.v.to(v.dtype), v], dim=-2)
        mask = self._sinusoid_mask(state, n_past + seq_len)
        bias = position.causal_bias(self.by_distance(q_position, sinusoids, mask))
        length = None
        if packing is not None:
            length = packing.length
            visible, _ = pack.visible_keys(packing, n_past, n_blocks=1)
            bias = bias.masked_fill(~visible[:, :, None].transpose(1, 2), -torch.inf)
        elif n_past > 0:  # rows that were reset have empty slots
            empty = ~state.window_valid
            bias = bias.masked_fill(F.pad(empty, (0, seq_len))[:, None, None, None], -torch.inf)
        wv = quadratic_attention(q_content, k_all, v_all, bias)
        after = FullState(
            k_all if length is None else pack.newest(state.k, k, n_past + seq_len, length, dim=-2),
            v_all if length is None else pack.newest(state.v, v, n_past + seq_len, length, dim=-2),
            pack.next_position(state.position, seq_len, packing),
            document=state.document,
            sinusoid_mask=mask,
        )
        return AttentionOutput(self.residual(wv, x_tilde), after, wv.new_zeros(()), None)

    def _sinusoid_mask(self, state: FullState, n_key: int) -> Tensor | None:
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

    def _state_shapes(self, state: AttentionState) -> dict[str, tuple[int, ...]]:
        n, h = state.k.shape[2], self.n_kv_head
        return {"keys": (h, n, self.d_k), "values": (h, n, self.d_v)}


def _join(
    outputs: list[AttentionOutput[VQState]], packings: Sequence[Packing | None]
) -> AttentionOutput[VQState]:
    """Return one output for consecutive segments; the commit loss is a mean over valid tokens."""
    if len(outputs) == 1:
        return outputs[0]
    y = torch.cat([output.y for output in outputs], dim=1)
    n_tokens = [
        torch.full((), output.y.shape[0] * output.y.shape[1], device=y.device)
        if packing is None or packing.length is None
        else packing.length.sum()
        for output, packing in zip(outputs, packings, strict=True)
    ]
    total = torch.stack(n_tokens).sum().clamp(min=1)
    losses = [output.commit_loss * n / total for output, n in zip(outputs, n_tokens, strict=True)]
    usages = [output.code_usage for output in outputs if output.code_usage is not None]
    usage = reduce(add, usages) if usages else None
    return AttentionOutput(y, outputs[-1].state, reduce(add, losses), usage)
