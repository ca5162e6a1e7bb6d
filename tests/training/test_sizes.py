"""Calculated sizes against the model itself: FLOPs, states and optimizer moments."""

from dataclasses import astuple, replace

import pytest
import torch
from helpers import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from transformer_vq import PRESETS, TransformerVQ
from transformer_vq.config import OptimConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.ops.runtime import EXECUTIONS
from transformer_vq.parallel.tensor_parallel import sharded_axes
from transformer_vq.training.optim import make_optimizer
from transformer_vq.training.sizes import flops_per_token, sizes

HEAD_TYPES = ("shga", "mqa", "mha", "gqa")
GATED = [name for name, preset in PRESETS.items() if preset.model.head_type == "shga"]


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


@pytest.mark.parametrize("name", GATED)
def test_flops_per_token_match_the_formula_of_the_paper(name):
    config = PRESETS[name].model
    d_model, d_k, d_v = config.d_model, config.d_k, 2 * config.d_model
    n_code, window = config.n_code, 2 * config.block_len
    gau = (
        2 * d_model * (2 * d_k + 3 * d_v)  # projections
        + 2 * n_code * d_k  # the nearest code
        + 2 * (n_code + window) * d_k  # scores
        + 2 * window * d_k  # positions
        + 2 * (n_code + window) * d_v  # values
    )
    want = 2 * config.n_layer * gau + 2 * d_model * config.vocab_size
    assert flops_per_token(config, 8192) == want
    assert flops_per_token(config, 32) == want


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize(
    "kind",
    [{"attention": "vq"}, {"attention": "vq", "compressive_cache": False}, {"attention": "full"}],
    ids=["vq", "window", "full"],
)
def test_flops_per_token_match_the_flops_counted_in_a_forward_pass(head_type, kind):
    # The serial reduction computes everything; the fast path skips an empty cache.
    config = tiny_config(head_type=head_type, **kind)
    model, tokens = TransformerVQ(config, reduction="serial"), torch.zeros(3, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    # All 24 keys are scored, including masked ones, which is the average over a sequence of 48.
    want = tokens.numel() * flops_per_token(config, 48)
    # The formula leaves out the projection of the sinusoids, once per batch. It has a positional
    # score for all 2 L keys, but the model computes one for each distance up to L.
    heads, kv_heads = n_heads(config)
    n_distances = 24 if config.attention == "full" else config.block_len + 1
    n_biased = 24 if config.attention == "full" else 2 * config.block_len
    n_attentions = len(model.init_state(1).layers)
    want += n_attentions * 2 * n_distances * config.d_model * kv_heads * config.d_k
    fewer = heads * 2 * (n_biased - n_distances) * config.d_k
    want -= n_attentions * tokens.numel() * fewer
    assert counter.get_total_flops() == want


def test_flops_of_full_attention_count_half_of_the_sequence():
    config = tiny_config(attention="full")
    per_key = 2 * 2 * config.n_layer * (config.d_k + config.d_k + 2 * config.d_model)
    more = flops_per_token(config, 2000) - flops_per_token(config, 1000)
    assert more == 500 * per_key


def test_train_flops_are_three_forward_passes():
    config = run_of()
    found = sizes(config)
    assert found.forward_flops == flops_per_token(config.model, config.train.seq_len)
    assert found.train_flops == 3 * found.forward_flops
    assert sizes(run_of(train={"checkpoint_activations": True})).train_flops == found.train_flops


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_state_bytes_of_vq_attention_do_not_grow(head_type, compressive_cache):
    config = run_of(head_type=head_type, compressive_cache=compressive_cache)
    model = TransformerVQ(config.model).eval()
    want = sizes(config).state_bytes
    assert model.init_state(1).n_bytes == want
    with torch.no_grad():
        assert model(torch.zeros(1, 24, dtype=torch.int64)).state.n_bytes == want


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_state_bytes_of_full_attention_are_those_after_a_complete_sequence(head_type):
    config = run_of(head_type=head_type, attention="full")
    with torch.no_grad():
        state = TransformerVQ(config.model).eval()(torch.zeros(1, 24, dtype=torch.int64)).state
    assert state.n_bytes == sizes(config).state_bytes


@pytest.mark.parametrize("name", GATED)
def test_parameters_of_the_presets_match_the_formula(name):
    config = PRESETS[name].model
    gau = config.d_model * (3 * config.d_k + 3 * 2 * config.d_model) + 2 * config.d_k
    want = config.vocab_size * config.d_model + 2 * config.n_layer * gau
    if not config.tie_embeddings:
        want += (config.d_model + 1) * config.vocab_size
    if config.absolute_positions:
        want += 1
    found = sizes(PRESETS[name])
    assert found.parameters == want
    assert found.codebooks == 2 * config.n_layer * config.n_code * (config.d_k + 1)


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("attention_type", ["vq", "full"])
def test_parameters_and_codebooks_match_the_model(head_type, attention_type):
    config = run_of(head_type=head_type, attention=attention_type)
    model = TransformerVQ(config.model)
    found = sizes(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    in_codebooks = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    assert found.codebooks == in_codebooks
    assert found.weight_bytes == 4 * (found.parameters + found.codebooks)


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


def test_factored_moments_are_much_smaller_than_the_weights():
    config = run_of(optim={"optimizer": "adafactor"}, **LARGE)
    found = sizes(config)
    assert found.optimizer_bytes < found.parameters * 4 / 20


def test_train_bytes_are_the_sum_of_their_parts():
    found = sizes(run_of())
    parts = (found.weight_bytes, found.weight_bytes, found.optimizer_bytes, found.activation_bytes)
    assert found.train_bytes == sum(parts)


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("attention_type", ["vq", "full"])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_activation_bytes_are_proportional_to_the_batch_size(
    head_type, attention_type, checkpoint_activations
):
    def activations(batch_size):
        train = {"batch_size": batch_size, "checkpoint_activations": checkpoint_activations}
        return sizes(run_of(train, head_type=head_type, attention=attention_type)).activation_bytes

    assert activations(12) == 12 * activations(1)


def test_accumulation_adds_only_the_carried_states():
    one, two = run_of({"batch_size": 4}), run_of({"batch_size": 8, "accumulate": 2})
    state = sizes(one).state_bytes
    assert sizes(two).activation_bytes == sizes(one).activation_bytes + 4 * state


def test_accumulate_zero_counts_as_one():
    assert sizes(run_of({"accumulate": 0})) == sizes(run_of({"accumulate": 1}))


@pytest.mark.parametrize("attention_type", ["vq", "full"])
@pytest.mark.parametrize("saving", [{"checkpoint_activations": True}, {"precision": "bf16"}])
def test_activation_bytes_shrink_with_options_that_save_memory(attention_type, saving):
    small = PRESETS["small"]
    model = replace(small.model, head_type="shga", attention=attention_type)
    plain = replace(small, model=model)
    saved = replace(plain, train=replace(plain.train, **saving))
    assert sizes(saved).activation_bytes < 0.8 * sizes(plain).activation_bytes


def test_activation_checkpointing_keeps_the_state_before_every_segment(monkeypatch):
    def more_with_six_segments(n_layer):
        config = run_of({"checkpoint_activations": True, "backprop_len": 24}, n_layer=n_layer)
        with monkeypatch.context() as patch:
            one = sizes(config)
            patch.setitem(EXECUTIONS, "cpu", replace(EXECUTIONS["cpu"], segment_scores=1))
            six = sizes(config)
        return six.activation_bytes - one.activation_bytes, one.state_bytes

    # One branch is recomputed at a time, so that part does not depend on the number of layers.
    (shallow, shallow_state), (deep, deep_state) = map(more_with_six_segments, (1, 3))
    assert deep - shallow == 8 * 5 * (deep_state - shallow_state)


@pytest.mark.parametrize("n_layer", [1, 2, 3])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"fsdp": 2}, {"fsdp": 2, "cp": 2}])
def test_sizes_match_the_model_for_any_number_of_layers(n_layer, head_type, mesh):
    config = run_of(head_type=head_type, n_layer=n_layer, tie_embeddings=True)
    config = replace(config, parallel=ParallelConfig(**mesh))
    model = TransformerVQ(config.model)
    divided = sharded_axes(model) if "tp" in mesh else {}
    n_shards = config.parallel.fsdp * config.parallel.cp
    resident = sum(
        -(-p.numel() // (n_shards * (2 if name in divided else 1)))
        for name, p in model.named_parameters()
    )
    gathered = 0
    if n_shards > 1:
        largest = max(sum(p.numel() for p in branch.parameters()) for branch in model.branches)
        gathered = model.embed.weight.numel() + 2 * largest
    found = sizes(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.codebooks == sum(b.numel() for b in model.buffers() if b.is_floating_point())
    assert found.weight_bytes == 4 * (resident + gathered + found.codebooks)
    assert found.optimizer_bytes == 8 * resident


def test_every_additional_layer_has_the_same_sizes():
    def of(n_layer, **parts):
        return torch.tensor(astuple(sizes(run_of(**LARGE | {"n_layer": n_layer} | parts))))

    for parts in (
        {},
        {"optim": {"optimizer": "adafactor"}},
        {"train": {"checkpoint_activations": True}},
    ):
        assert torch.equal(of(5, **parts) - of(4, **parts), of(2, **parts) - of(1, **parts))
