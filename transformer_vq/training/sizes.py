"""How large a run is, by arithmetic: parameters, FLOPs per token, state and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.device import find_device, has_fast_bf16
from transformer_vq.errors import UserError
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.tensor_parallel import divided_axes

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Sizes:
    """All memory in bytes and on one device, all FLOPs per token."""

    parameters: int
    codebooks: int
    """Numbers in the codebooks, which are no parameters."""
    forward_flops: int
    train_flops: int
    """Forward and backward; recomputation counts as nothing."""
    state_bytes: int
    """What decoding carries per sequence; for full attention after seq_len tokens."""
    weight_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Estimate for one micro-batch, states included."""

    @property
    def train_bytes(self) -> int:
        """Weights with gradients, codebooks with code usage, optimizer and activations."""
        return 2 * self.weight_bytes + self.optimizer_bytes + self.activation_bytes


def sizes(config: RunConfig) -> Sizes:
    """Nothing is allocated: one layer is built on the meta device; all layers are alike.

    With `config.parallel`, memory is that of one of its devices; `dp=0` counts as 1.
    Raises UserError if the run cannot be divided in that way.
    """
    check_mesh(config, config.parallel)
    with torch.device("meta"):
        model = TransformerVQ(replace(config.model, n_layer=1), reduction=config.train.reduction)
    layout = config.parallel
    n_shards = layout.fsdp * layout.cp if layout.fsdp > 1 else 1
    divided = divided_axes(model) if layout.tp > 1 else {}
    n_parts = {
        name: n_shards * (layout.tp if name in divided else 1) for name in model.state_dict()
    }
    shapes = {name: p.shape for name, p in model.named_parameters()}
    copies = {
        name: config.model.n_layer if name.startswith("branches.") else 1
        for name in model.state_dict()
    }
    parameters = sum(copies[name] * shape.numel() for name, shape in shapes.items())
    codebooks = sum(
        copies[name] * b.numel() for name, b in model.named_buffers() if "started" not in name
    )
    # What lies on a device all the time, and what FSDP gathers: embeddings and head, and two
    # branches, that at work and the next one.
    resident = sum(
        copies[name] * -(-shape.numel() // n_parts[name]) for name, shape in shapes.items()
    )
    gathered = 0
    if n_shards > 1:
        branches = [sum(p.numel() for p in branch.parameters()) for branch in model.branches]
        gathered = parameters - config.model.n_layer * sum(branches) + 2 * max(branches)
    forward = flops_per_token(config.model, config.train.seq_len)
    if config.optim.optimizer == "adamw":
        optimizer = 2 * resident
    else:
        optimizer = sum(
            copies[name] * _adafactor_numbers(shape, n_parts[name])
            for name, shape in shapes.items()
        )
    return Sizes(
        parameters=parameters,
        codebooks=codebooks,
        forward_flops=forward,
        train_flops=3 * forward,
        state_bytes=_state_bytes(config.model, config.train.seq_len),
        weight_bytes=FLOAT * (resident + gathered + codebooks),
        optimizer_bytes=FLOAT * optimizer,
        activation_bytes=_activation_bytes(config, _n_segments(model, config)),
    )


def memory_hint(config: RunConfig) -> str:
    """Return the options that reduce the memory of this run, as advice to the user."""
    model, train = config.model, config.train
    advice = []
    n_rows = train.batch_size // config.parallel.n_rows
    if n_rows > 1:
        advice.append("reduce --train.batch-size")
        if 0 < train.accumulate < n_rows:
            advice[0] += " or raise --train.accumulate"
    if not train.checkpoint_activations:
        advice.append("use --train.checkpoint_activations")
    if train.precision == "fp32" and _has_fast_bf16(train.device):
        advice.append("use --train.precision bf16")
    smaller = ["--train.seq-len"] if model.attention == "full" else []
    if train.backprop_len > model.block_len:
        smaller.append("--train.backprop-len")
    advice.append(f"use a smaller {' or '.join([*smaller, '--model.d-model'])}")
    return ", or ".join(filter(None, [", ".join(advice[:-1]), advice[-1]]))


def _has_fast_bf16(device: str) -> bool:
    try:
        return has_fast_bf16(find_device(device))
    except UserError:  # reported when the run starts
        return False


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Multiplications and additions of the forward pass, per token.

    Full attention meets half of `seq_len` keys on average; linear attention S codes and 2 L keys.
    """
    d_model, d_k = config.d_model, config.d_k
    geometry, d_ff = config.layer.heads, config.d_ff
    heads, kv_heads, d_v = geometry.n_head, geometry.n_kv_head, geometry.d_v
    if geometry.is_gated:
        projections = 2 * d_model * (2 * d_k + 3 * d_v)
    else:
        projections = 2 * d_model * (2 * heads * d_k + kv_heads * (d_k + d_v))
    if config.attention == "full":
        keys = biased = seq_len // 2
        nearest = 0
    else:
        biased = 2 * config.block_len
        keys = biased + (config.n_code if config.compressive_cache else 0)
        nearest = 2 * config.n_code * d_k * kv_heads
    attention = heads * (2 * keys * d_k + 2 * biased * d_k + 2 * keys * d_v)
    feed_forward = 4 * d_model * d_ff
    per_layer = (projections + nearest + attention) * config.n_attention + feed_forward
    return config.n_layer * per_layer + 2 * d_model * config.vocab_size


def _state_bytes(config: ModelConfig, seq_len: int, wide: int = FLOAT, tp: int = 1) -> int:
    """Arithmetic instead of a state on the meta device: that of full attention is not made yet.

    wide: bytes of a number in keys and values; the cache has float32 means and int64 counts.
    """
    geometry = config.layer.heads.shard(tp)
    kv_heads, d_v = geometry.n_kv_head, geometry.d_v
    if config.attention == "full":
        per_head = wide * seq_len * (config.d_k + d_v)
    else:
        per_head = config.block_len * (wide * (config.d_k + d_v) + 8)
        if config.compressive_cache:
            per_head += config.n_code * (FLOAT * d_v + 8)
    position = 8
    return config.n_layer * config.n_attention * (kv_heads * per_head + position)


def _activation_bytes(config: RunConfig, n_segments: int) -> int:
    """What the backward pass of one micro-batch needs at its peak, beside weights and gradients.

    Counted are tensors that autograd keeps, states before and after, logits, and the gradients of
    one branch's scores and values. Tables of positions, which have no batch, are left out, and so
    is memory that an allocator holds without using it.
    n_segments: parts in which a window goes through a branch; recomputation keeps the state before
    each of them, and computes one of them again at a time.
    """
    model, train, layout = config.model, config.train, config.parallel
    n_rows = _micro_batch(config)
    geometry, d_ff = model.layer.heads.shard(layout.tp), model.d_ff // layout.tp
    heads, kv_heads, d_v = geometry.n_head, geometry.n_kv_head, geometry.d_v
    wide = 2 if train.precision == "bf16" else FLOAT
    state_before = _state_bytes(model, train.seq_len - train.backprop_len, wide, layout.tp)
    state_after = _state_bytes(model, train.seq_len, wide, layout.tp)

    # Numbers per token that an attention branch keeps of queries for content and for position, of
    # the output, with a gate also before it and the gate itself, and of keys and values as
    # projected, for VQ also quantized and as the previous block.
    kept = heads * (4 * model.d_k + d_v)
    if geometry.is_gated:
        kept += 3 * d_v
    if model.attention == "full":
        scores = heads * train.seq_len
        kept += kv_heads * (model.d_k + d_v)
    else:
        scores = heads * 2 * model.block_len
        kept += 4 * kv_heads * (model.d_k + d_v)
        if model.compressive_cache:
            scores += heads * model.n_code
            kept += kv_heads * model.n_code * d_v // model.block_len  # the cache before each block
    # The softmax is float32; products take it in their own type, those of VQ by key head.
    copied = wide < FLOAT or (model.attention == "vq" and heads > kv_heads)
    norm = 2 * FLOAT * model.d_model  # the input before and after it
    attention = norm + wide * kept + (FLOAT + copied * wide) * scores
    feed_forward = norm + wide * 2 * d_ff if d_ff else 0
    gradients = FLOAT * 2 * (scores + heads * d_v)

    tokens = n_rows * train.backprop_len // layout.cp
    logits = 3 * FLOAT * model.vocab_size
    if train.checkpoint_activations:
        inputs = 2 * model.n_layer * FLOAT * model.d_model
        again = max(attention + gradients, n_segments * feed_forward) // n_segments
        per_token = inputs + again + logits
        state_after *= n_segments
    else:
        per_layer = attention * model.n_attention + feed_forward
        per_token = model.n_layer * per_layer + gradients + logits
    carried = train.batch_size // layout.n_rows * state_before
    return tokens * per_token + carried + n_rows * state_after


def _micro_batch(config: RunConfig) -> int:
    """Sequences that go through the model at once; all, if the number of parts is left open."""
    n_parts = config.parallel.n_rows * max(config.train.accumulate, 1)
    return config.train.batch_size // n_parts


def _n_segments(model: TransformerVQ, config: RunConfig) -> int:
    """In how many parts a window of a micro-batch goes through an attention branch."""
    train, attention = config.train, model.branches[0]
    if not isinstance(attention, VQAttention) or config.parallel.cp > 1:
        return 1
    segment_len = attention._segment_len(_micro_batch(config), train.backprop_len)
    return -(-train.backprop_len // segment_len)


def _adafactor_numbers(shape: torch.Size, n_parts: int = 1, min_factored: int = 128) -> int:
    """Second moments as a row and a column where both dimensions are large enough."""
    if len(shape) < 2 or sorted(shape)[-2] < min_factored:
        return -(-shape.numel() // n_parts)
    *_, second, largest = sorted(shape)
    return shape.numel() // second + shape.numel() // largest
