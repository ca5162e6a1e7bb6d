"""Calculated sizes against the model itself; limits; memory advice; model FLOP utilization."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import tiny_config, tiny_run
from torch.utils.flop_counter import FlopCounterMode

from transformer_vq import PRESETS, TransformerVQ
from transformer_vq.config import OptimConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.parallel.tensor_parallel import sharded_axes
from transformer_vq.parallel.world import World
from transformer_vq.sizes import (
    flops_per_token,
    mfu_per_token,
    peak_rate,
    sizes,
)
from transformer_vq.training.optim import make_optimizer

HEAD_TYPES = ("shga", "mqa", "mha", "gqa")
TOKENS = torch.zeros(3, 24, dtype=torch.int64)
every_kind = pytest.mark.parametrize(
    "kind",
    [{"attention": "vq"}, {"attention": "vq", "compressive_cache": False}, {"attention": "full"}],
    ids=["vq", "window", "full"],
)


def run_of(train=None, optim=None, **model):
    """Return the config of a tiny run."""
    train = {"batch_size": 8, "seq_len": 24, "backprop_len": 8} | (train or {})
    return RunConfig(
        tiny_config(**model), optim=OptimConfig(**(optim or {})), train=TrainConfig(**train)
    )


def n_heads(config):
    """Return the number of query heads and of key heads."""
    heads = 1 if config.head_type == "shga" else config.d_model // config.d_k
    return heads, {"mha": heads, "gqa": config.n_kv_head}.get(config.head_type, 1)


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@every_kind
def test_flops_per_token_match_the_flops_counted_in_a_forward_pass(head_type, kind):
    # The serial reduction computes everything; the fast path skips an empty cache.
    config = tiny_config(head_type=head_type, **kind)
    model = TransformerVQ(config, reduction="serial")
    with FlopCounterMode(display=False) as counter:
        model(TOKENS)
    # All 24 keys are scored, including masked ones, which is the average over a sequence of 48.
    want = TOKENS.numel() * flops_per_token(config, 48)
    # The formula leaves out the projection of the sinusoids, once per batch. It has a positional
    # score for all 2 L keys, but the model computes one for each distance up to L.
    heads, kv_heads = n_heads(config)
    n_distances = 24 if config.attention == "full" else config.block_len + 1
    n_biased = 24 if config.attention == "full" else 2 * config.block_len
    n_attentions = len(model.init_state(1).layers)
    want += n_attentions * 2 * n_distances * config.d_model * kv_heads * config.d_k
    fewer = heads * 2 * (n_biased - n_distances) * config.d_k
    want -= n_attentions * TOKENS.numel() * fewer
    assert counter.get_total_flops() == want


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@every_kind
def test_state_bytes_are_those_after_a_complete_sequence(head_type, kind):
    config = run_of(head_type=head_type, **kind)
    model, want = TransformerVQ(config.model).eval(), sizes(config).state_bytes
    with torch.no_grad():
        assert model(TOKENS[:1]).state.n_bytes == want
    grows = model.init_state(1).n_bytes != want
    assert grows == (config.model.attention == "full")


LARGE = {"vocab_size": 130, "d_model": 128, "d_k": 128, "n_layer": 1}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("model", [{}, LARGE, LARGE | {"absolute_positions": True}])
def test_optimizer_bytes_match_the_state_after_a_step(optimizer, head_type, model):
    if head_type == "gqa" and model:
        model = model | {"d_k": 32}
    config = run_of(optim={"optimizer": optimizer}, head_type=head_type, **model)
    trained = TransformerVQ(config.model)
    for p in trained.parameters():
        p.grad = torch.ones_like(p)
    stepped = make_optimizer(dict(trained.named_parameters()), config.optim)
    stepped.step()
    kept = [x for state in stepped.state.values() for name, x in state.items() if name != "step"]
    want = sum(x.numel() * x.element_size() for x in kept)
    assert sizes(config).optimizer_bytes == want


@pytest.mark.parametrize("attention_type", ["vq", "full"])
@pytest.mark.parametrize("saving", [{"checkpoint_activations": True}, {"precision": "bf16"}])
def test_activation_bytes_shrink_with_options_that_save_memory(attention_type, saving):
    small = PRESETS["small"]
    model = replace(small.model, head_type="shga", attention=attention_type)
    plain = replace(small, model=model)
    saved = replace(plain, train=replace(plain.train, **saving))
    got, want = (x.activation_bytes + x.carried_bytes for x in (sizes(saved), sizes(plain)))
    assert got < 0.8 * want


@pytest.mark.parametrize("n_layer", [1, 3])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"fsdp": 2}, {"fsdp": 2, "cp": 2}])
def test_sizes_match_the_model_for_any_number_of_layers(n_layer, head_type, mesh):
    even = {"vocab_size": 16, "tie_embeddings": True}  # shards of the same size
    config = run_of(head_type=head_type, n_layer=n_layer, **even)
    config = replace(config, parallel=ParallelConfig(**mesh))
    model = TransformerVQ(config.model)
    divided = sharded_axes(model) if "tp" in mesh else {}
    n_shards = config.parallel.fsdp * config.parallel.cp
    n_parts = {name: 2 if name in divided else 1 for name in model.state_dict()}
    resident = sum(p.numel() // (n_shards * n_parts[x]) for x, p in model.named_parameters())
    gathered = 0
    if n_shards > 1:
        largest = max(sum(p.numel() for p in branch.parameters()) for branch in model.branches)
        gathered = 2 * (model.embed.weight.numel() + 2 * largest)
    found = sizes(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    buffers = {name: b.numel() for name, b in model.named_buffers() if b.is_floating_point()}
    assert found.codebooks == sum(buffers.values())
    codebooks = sum(n // n_parts[name] for name, n in buffers.items())
    assert found.weight_bytes == found.gradient_bytes == 4 * (resident + codebooks)
    assert found.gathered_bytes == 4 * gathered
    assert found.optimizer_bytes == 8 * resident


def _flops_of_baddbmm(total, a, b, *_, **__):
    return 2 * math.prod(a) * b[-1]


def training_flops(model: TransformerVQ, seq_len: int) -> int:
    """Return the FLOPs of a forward and backward pass over one sequence."""
    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    uncounted_by_torch = {torch.ops.aten.baddbmm_: _flops_of_baddbmm}
    with FlopCounterMode(display=False, custom_mapping=uncounted_by_torch) as counter:
        model(tokens).logits.sum().backward()
    return counter.get_total_flops()


def growth(**config) -> list[int]:
    """Return the additional FLOPs of every 32 more tokens."""
    model = TransformerVQ(tiny_config(n_layer=1, **config))
    flops = [training_flops(model, seq_len) for seq_len in (32, 64, 96, 128)]
    return [longer - shorter for shorter, longer in pairwise(flops)]


@pytest.mark.parametrize("head_type", ["shga", "mqa", "mha"])
def test_flops_grow_linearly_with_vq_attention_and_quadratically_with_full_attention(head_type):
    assert len(set(growth(head_type=head_type, attention="vq"))) == 1
    first, second, third = growth(head_type=head_type, attention="full")
    assert third - second == second - first > 0


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ],
)
def test_peak_rates_are_found_by_the_complete_name(name, bf16, fp32):
    assert peak_rate(name, "bf16") == bf16
    assert peak_rate(name, "fp32") == fp32
    assert peak_rate("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156e12


def test_a_gpu_of_the_table_gives_an_mfu(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, train={"precision": "bf16"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    world = World()
    assert mfu_per_token(config, world) is None
    world.device = torch.device("cuda")
    flops = sizes(config).train_flops
    assert mfu_per_token(config, world) == pytest.approx(flops / 312e12)
    world.mesh = replace(world.mesh, dp=4)  # all devices count
    assert mfu_per_token(config, world) == pytest.approx(flops / 312e12 / 4)
