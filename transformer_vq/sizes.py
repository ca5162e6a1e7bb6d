"""Sizes of a run, calculated from its config: parameters, FLOPs per token, state and memory.

Also what follows from them: how many micro-batches fit in memory, and the share of the peak rate of
the devices that a run reaches (model FLOP utilization, MFU).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from transformer_vq.config import ModelConfig, Precision, RunConfig
from transformer_vq.device import meta_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.parallel.tensor_parallel import shard_heads, sharded_axes
from transformer_vq.parallel.world import World
from transformer_vq.progress import warn

FLOAT_BYTES = 4  # of a float32
MEMORY_HINT = (
    "reduce --train.batch-size or raise --train.accumulate, use --train.checkpoint-activations, or "
    "use a smaller --train.backprop-len or --model.d-model"
)
USABLE_MEMORY = 0.7  # fraction of a device's memory that `choose_accumulation` plans with

# Peak rates in TFLOP/s for bf16, TF32 and fp32: the vendors' figures for dense matrix products with
# float32 accumulation. By the complete name of the GPU, as PyTorch reports it, without the vendor:
# laptop GPUs and parts of a GPU (MIG) have other rates.
PEAKS = {
    r"A100([ -].*GB.*)?": (312, 156, 19.5),
    r"H100( .*HBM.*)?|H200": (989, 495, 67),
    r"H100 PCIe": (756, 378, 51),
    r"H100 NVL|H200 NVL": (835, 418, 60),
    r"B200": (2250, 1125, 75),
    r"L4": (121, 60, 30.3),
    r"L40S": (362, 183, 91.6),
    r"A10": (125, 62.5, 31.2),
    r"GeForce RTX 3090": (71, 35.6, 35.6),
    r"GeForce RTX 4090": (165, 82.6, 82.6),
    r"GeForce RTX 5090": (210, 105, 105),
    r"Instinct MI300X( .*)?": (1307, 654, 163),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: memory in bytes on one device, FLOPs per token."""

    parameters: int
    codebooks: int
    """Elements of the codebooks, which are buffers, not parameters."""
    forward_flops: int
    train_flops: int
    """Forward and backward pass; recomputed activations are not counted."""
    state_bytes: int
    """Decoding state of one sequence; for full attention after `seq_len` tokens."""
    weight_bytes: int
    """Parameters and codebooks that stay on the device."""
    gradient_bytes: int
    """Gradients, and the usage of the codebooks. With several micro-batches they are sharded only
    after the last one."""
    gathered_bytes: int
    """Parameters that FSDP gathers, with their gradients: embeddings, head and two branches."""
    optimizer_bytes: int
    activation_bytes: int
    """Estimate for one micro-batch."""
    carried_bytes: int
    """States of all rows between two steps."""
    average_bytes: int = 0
    """Average of the weights; 0 if `train.weight_average` is 0."""

    @property
    def train_bytes(self) -> int:
        """Memory for training: `fixed_bytes`, activations and carried states."""
        return self.fixed_bytes + self.activation_bytes + self.carried_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory that does not depend on the batch."""
        weights = self.weight_bytes + self.gradient_bytes + self.gathered_bytes
        return weights + self.optimizer_bytes + self.average_bytes


def sizes(config: RunConfig) -> Sizes:
    """Return the sizes of a run without allocating memory.

    A single layer is built on the meta device, because all layers have the same shapes. Memory is
    that of one device of the mesh `config.parallel`; `dp=0` counts as 1. Raises UserError if the
    run cannot be divided among that mesh.
    """
    check_mesh(config, config.parallel)
    with meta_device():
        model = TransformerVQ(replace(config.model, n_layer=1), reduction=config.train.reduction)
    mesh = config.parallel
    n_shards = mesh.fsdp * mesh.cp
    divided = sharded_axes(model) if mesh.tp > 1 else {}
    n_parts = {name: n_shards * (mesh.tp if name in divided else 1) for name in model.state_dict()}
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def total(numbers: dict[str, int]) -> int:
        """Return the sum over all tensors of the complete model."""
        branches = sum(n for name, n in numbers.items() if name.startswith("branches."))
        return sum(numbers.values()) + branches * (config.model.n_layer - 1)

    buffers = {name: b.numel() for name, b in model.named_buffers() if "started" not in name}
    codebooks = total(buffers)
    resident = total({x: -(-shape.numel() // n_parts[x]) for x, shape in shapes.items()})
    whole = {x: shape.numel() * n_shards // n_parts[x] for x, shape in shapes.items()}  # by FSDP
    gathered, gradients = 0, resident
    if n_shards > 1:  # embeddings and head, the current branch and the next one
        others = sum(n for name, n in whole.items() if not name.startswith("branches."))
        branches = [
            sum(n for name, n in whole.items() if name.startswith(f"branches.{i}."))
            for i in range(len(model.branches))
        ]
        gathered = 2 * (others + 2 * max(branches))
        if config.train.accumulate > 1:
            gathered, gradients = gathered // 2, total(whole)
    forward = flops_per_token(config.model, config.train.seq_len)
    n_before = config.train.seq_len - config.train.backprop_len  # tokens before the last span
    n_bytes = 2 if config.train.precision == "bf16" else FLOAT_BYTES
    carried = _state_bytes(config.model, n_before, n_bytes, mesh.tp)
    optimizer = 2 * resident  # muon: at most; its matrices keep one moment
    if config.optim.optimizer == "adafactor":
        optimizer = total({x: _adafactor_elements(s, n_parts[x]) for x, s in shapes.items()})
    return Sizes(
        parameters=total({name: shape.numel() for name, shape in shapes.items()}),
        codebooks=codebooks,
        forward_flops=forward,
        train_flops=3 * forward,
        state_bytes=_state_bytes(config.model, config.train.seq_len),
        weight_bytes=FLOAT_BYTES * (resident + codebooks),
        gradient_bytes=FLOAT_BYTES * (gradients + codebooks),
        gathered_bytes=FLOAT_BYTES * gathered,
        optimizer_bytes=FLOAT_BYTES * optimizer,
        activation_bytes=_activation_bytes(config),
        carried_bytes=config.train.batch_size // mesh.n_rows * carried,
        average_bytes=FLOAT_BYTES * resident if config.train.weight_average else 0,
    )


def choose_accumulation(config: RunConfig, world: World) -> RunConfig:
    """Return the config with the fewest micro-batches that fit in the memory of each process.

    A config with a fixed `train.accumulate` (not 0) is returned unchanged.
    """
    if config.train.accumulate:
        return config
    memory = total_memory(world.device)
    if world.device.type == "cpu":  # the processes of a machine share its memory
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_rows = config.train.batch_size // world.mesh.n_rows
    for accumulate in (n for n in range(1, n_rows + 1) if n_rows % n == 0):
        chosen = replace(config, train=replace(config.train, accumulate=accumulate))
        needed = sizes(replace(chosen, parallel=world.mesh)).train_bytes
        if world.smallest(needed <= USABLE_MEMORY * memory):
            break
    else:
        warn(f"one sequence at a time may not fit in memory; {MEMORY_HINT}")
    return chosen


def check_memory(config: RunConfig, world: World) -> None:
    """Raise UserError if not even the weights, gradients and optimizer fit in memory."""
    needed = sizes(replace(config, parallel=world.mesh)).fixed_bytes
    total = total_memory(world.device)
    if needed > total:
        raise UserError(
            f"out of memory: weights, gradients and optimizer take {needed / 1e9:,.1f} GB, this "
            f"device has {total / 1e9:,.1f} GB; {MEMORY_HINT}"
        )


def peak_rate(name: str, precision: Precision, tf32: bool = False) -> float | None:
    """Return the peak FLOPs per second of a GPU, or None if it is not known.

    name: as `torch.cuda.get_device_name` returns it. tf32: whether fp32 products use TF32.
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", name)
    for pattern, (bf16, with_tf32, fp32) in PEAKS.items():
        if re.fullmatch(pattern, name) and " MIG " not in name:
            return 1e12 * (bf16 if precision == "bf16" else with_tf32 if tf32 else fp32)
    return None


def mfu_per_token(config: RunConfig, world: World) -> float | None:
    """Return the MFU of one token per second on all devices; None if the peak is unknown."""
    if world.device.type != "cuda":
        return None
    name, tf32 = torch.cuda.get_device_name(world.device), torch.get_float32_matmul_precision()
    peak = peak_rate(name, config.train.precision, tf32 != "highest")
    flops = 3 * flops_per_token(config.model, config.train.seq_len)
    return None if peak is None else flops / (peak * world.mesh.n_processes)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the multiplications and additions of the forward pass, per token.

    With full attention a query attends to half of `seq_len` keys on average, with VQ attention to
    S codes and 2 L keys.
    """
    d_model, d_k = config.d_model, config.d_k
    geometry, d_ff = config.layer.heads, config.feed_forward_width
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


def _state_bytes(config: ModelConfig, seq_len: int, n_bytes: int = FLOAT_BYTES, tp: int = 1) -> int:
    """Return the bytes of the state of one sequence after `seq_len` tokens.

    n_bytes: per element of keys and values. The cache has float32 means and int64 counts.
    It cannot be measured on the meta device: the initial state of full attention is empty.
    """
    geometry = shard_heads(config.layer.heads, tp)
    kv_heads, d_v = geometry.n_kv_head, geometry.d_v
    if config.attention == "full":
        per_head = n_bytes * seq_len * (config.d_k + d_v)
    else:
        per_head = config.block_len * (n_bytes * (config.d_k + d_v) + 8)
        if config.compressive_cache:
            per_head += config.n_code * (FLOAT_BYTES * d_v + 8)
    position = 8
    return config.n_layer * config.n_attention * (kv_heads * per_head + position)


def _activation_bytes(config: RunConfig) -> int:
    """Return the peak memory of the backward pass of one micro-batch, without weights.

    It includes the tensors saved by autograd, the state after the span, the logits,
    and the gradients of one branch's scores and values. It excludes the positional embeddings,
    which have no batch dimension, and memory that the allocator reserves without using it.
    With activation checkpointing, one branch is recomputed at a time.
    """
    model, train, mesh = config.model, config.train, config.parallel
    n_rows = train.batch_size // (mesh.n_rows * max(train.accumulate, 1))  # of a micro-batch
    geometry, d_ff = shard_heads(model.layer.heads, mesh.tp), model.feed_forward_width // mesh.tp
    heads, kv_heads, d_v = geometry.n_head, geometry.n_kv_head, geometry.d_v
    n_bytes = 2 if train.precision == "bf16" else FLOAT_BYTES
    state_after = _state_bytes(model, train.seq_len, n_bytes, mesh.tp)

    # Elements per token that autograd saves in an attention branch: queries for content and for
    # position, the output, with a gate also its input and the gate, keys and values as projected,
    # and for VQ also quantized and as the previous block.
    saved = heads * (4 * model.d_k + d_v)
    if geometry.is_gated:
        saved += 3 * d_v
    if model.attention == "full":
        scores = heads * train.seq_len
        saved += kv_heads * (model.d_k + d_v)
    else:
        scores = heads * 2 * model.block_len
        saved += 4 * kv_heads * (model.d_k + d_v)
        if model.compressive_cache:
            scores += heads * model.n_code
            saved += kv_heads * model.n_code * d_v // model.block_len  # the cache before each block
    # The softmax is float32. The following product copies it if its dtype differs, and for VQ also
    # if several query heads share a key head.
    is_copied = n_bytes < FLOAT_BYTES or (model.attention == "vq" and heads > kv_heads)
    norm = 2 * FLOAT_BYTES * model.d_model  # the input and the output of RMSNorm
    attention = norm + n_bytes * saved + (FLOAT_BYTES + is_copied * n_bytes) * scores
    feed_forward = norm + n_bytes * 2 * d_ff if d_ff else 0
    gradients = FLOAT_BYTES * 2 * (scores + heads * d_v)

    tokens = n_rows * train.backprop_len // mesh.cp
    logits = 3 * FLOAT_BYTES * model.vocab_size
    if train.checkpoint_activations:
        inputs = 2 * model.n_layer * FLOAT_BYTES * model.d_model
        per_token = inputs + max(attention + gradients, feed_forward) + logits
    else:
        per_layer = attention * model.n_attention + feed_forward
        per_token = model.n_layer * per_layer + gradients + logits
    return tokens * per_token + n_rows * state_after


def _adafactor_elements(shape: torch.Size, n_parts: int) -> int:
    """Return the elements of Adafactor's second moment; large matrices are factored."""
    if len(shape) < 2 or sorted(shape)[-2] < 128:
        return -(-shape.numel() // n_parts)
    return sum(shape.numel() // n for n in sorted(shape)[-2:])
