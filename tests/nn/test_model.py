"""The model: split invariance, options, saving, and clear errors."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_vq import PRESETS, TransformerVQ, UserError
from transformer_vq.files import read_tensors, write_tensors
from transformer_vq.nn.model import ModelState
from transformer_vq.nn.quantizer import NotFiniteError

HEAD_TYPES = ["shga", "mqa", "mha", "gqa"]
ATTENTIONS = ["vq", "full"]


def make(**overrides) -> TransformerVQ:
    torch.manual_seed(0)
    return tiny_model(**overrides).double()


def tokens(batch_size: int, seq_len: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_config().vocab_size, (batch_size, seq_len), generator=generator)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@given(cuts=st.sets(st.integers(1, 29), max_size=5))
@settings(max_examples=5)
def test_results_do_not_depend_on_the_cuts(head_type, attention, cuts):
    model = make(head_type=head_type, attention=attention, absolute_positions=True)
    torch.nn.init.ones_(model.positions.scale)
    x = tokens(2, 30)
    state, parts = None, []
    edges = [0, *sorted(cuts), 30]
    for start, stop in itertools.pairwise(edges):
        output = model(x[:, start:stop], state)
        state = output.state
        parts.append(output.logits)
    assert_close("logits", torch.cat(parts, dim=1), model(x).logits)


@pytest.mark.parametrize("compressive_cache", [True, False])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_decoding_token_by_token_equals_the_forward(head_type, compressive_cache):
    model = make(head_type=head_type, compressive_cache=compressive_cache)
    x = tokens(3, 25)
    state, parts = model.init_state(3), []
    for t in range(25):
        output = model(x[:, t : t + 1], state)
        state = output.state
        parts.append(output.logits)
    assert_close("logits", torch.cat(parts, dim=1), model(x).logits)
    assert state.position.tolist() == [25] * 3


def test_the_state_does_not_grow():
    model = make()
    state = model(tokens(2, 5)).state
    later = model(tokens(2, 64), state).state
    assert later.n_bytes == state.n_bytes == model.init_state(2).n_bytes
    assert later.layers[0].v.untyped_storage().nbytes() == state.layers[0].v.numel() * 8


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_activation_checkpointing_changes_nothing(head_type, attention, is_ragged):
    """Recomputed activations use the same dropout masks."""
    ids = torch.arange(21).expand(2, -1) // 6
    ragged = {"valid": torch.rand(2, 21) < 0.8, "document_ids": ids} if is_ragged else {}
    drop = {"p_dropsin": 0.3, "p_dropres": 0.3, "p_droplyr": 0.3}
    config = tiny_config(head_type=head_type, attention=attention, **drop)
    x = tokens(2, 21)
    results = []
    for checkpoint_activations in (False, True):
        torch.manual_seed(0)
        model = TransformerVQ(config, checkpoint_activations=checkpoint_activations).double()
        torch.manual_seed(1)
        output = model(x, **ragged)
        (output.logits.square().mean() + output.commit_loss).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append((output, grads))
    (plain, plain_grads), (again, again_grads) = results
    assert torch.equal(plain.logits, again.logits)
    for a, b in zip(plain.code_usage, again.code_usage, strict=True):
        assert torch.equal(a.sum, b.sum)
    for name, grad in plain_grads.items():
        assert_close(name, again_grads[name], grad)


def test_layerdrop_is_drawn_once_per_sequence_and_rescaled():
    model = make(p_droplyr=0.5)
    first = model(tokens(64, 3)).state
    assert first.branch_keep.shape == (64, 4)
    assert 0.35 < float(first.branch_keep.double().mean()) < 0.65
    second = model(tokens(64, 3), first).state
    assert torch.equal(second.branch_keep, first.branch_keep)
    rows = torch.arange(64) < 32
    third = model(tokens(64, 3), second.reset(rows)).state
    assert torch.equal(third.branch_keep[32:], first.branch_keep[32:])
    assert not torch.equal(third.branch_keep[:32], first.branch_keep[:32])
    model.eval()
    assert model(tokens(2, 3)).state.branch_keep is None


def test_a_row_that_drops_every_branch_is_embedding_and_head():
    model = make(p_droplyr=0.5)
    x = tokens(2, 5)
    state = model(x).state
    kept = torch.zeros_like(state.branch_keep)
    kept[1] = True
    output = model(x, dataclasses.replace(state, branch_keep=kept))
    bare = F.linear(model.embed(x[0]), model.head.weight, model.head.bias)
    assert_close("dropped row", output.logits[0], bare)
    assert not torch.allclose(output.logits[1], F.linear(model.embed(x[1]), model.head.weight))


def test_tied_scaled_normalised_head_by_hand():
    model = make(tie_embeddings=True, final_norm=True, logit_scale=0.05)
    assert model.head.weight is model.embed.weight
    features = {}
    original = model.finish
    model.finish = lambda x: features.setdefault("x", x) is None or original(x)
    logits = model(tokens(1, 4)).logits
    x = features["x"]
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close("logits", logits, 0.05 * normed @ model.embed.weight.T)


def test_code_usage_is_empty_in_evaluation_mode_without_gradients():
    model = make().eval()
    with torch.no_grad():
        output = model(tokens(2, 20))
    assert output.code_usage == ()
    with pytest.raises(ValueError, match="training mode"):
        model.update_codebooks(output.code_usage)
    with pytest.raises(ValueError, match="1 entries for 4 codebooks"):
        model.update_codebooks(model.train()(tokens(2, 20)).code_usage[:1])


@pytest.mark.parametrize("reduction", ["auto", "serial", "matmul", "associative", "input_scan"])
def test_autocast_keeps_what_must_be_exact_in_float32(reduction):
    model = TransformerVQ(tiny_config(), reduction=reduction)
    x = tokens(2, 30)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x[:, -1:], model(x[:, :-1]).state)
    assert output.logits.dtype == output.commit_loss.dtype == torch.float32
    for state, usage in zip(output.state.layers, output.code_usage, strict=True):
        assert (state.cache.mean.dtype, state.cache.count.dtype) == (torch.float32, torch.int64)
        assert usage.sum.dtype == usage.count.dtype == torch.float32
    assert_close("logits", output.logits, exact.logits[:, -1:], tolerance=2e-2)


def test_a_bfloat16_model_runs_with_float32_codebooks_and_logits():
    model = TransformerVQ(tiny_config())
    before = model.branches[0].quantizer.c_sum.clone()
    model.to(torch.bfloat16)
    output = model(tokens(2, 30))
    assert output.logits.dtype == output.code_usage[0].sum.dtype == torch.float32
    assert torch.equal(model.branches[0].quantizer.c_sum, before)
    assert output.state.layers[0].v.dtype == torch.bfloat16
    assert output.state.layers[0].cache.mean.dtype == torch.float32
    assert output.state.layers[0].cache.count.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "millions", "paper"),
    [
        ("enwik8-190m", 187.6, "190M"),
        ("pg19-1.3b", 1314.4, "1.3B"),
        ("imagenet64-190m", 187.6, "190M"),
        ("imagenet64-1.2b", 1249.4, "1.2B"),
    ],
)
def test_presets_have_the_parameter_counts_of_the_paper(name, millions, paper):
    """Codebooks included, as the paper counts them."""
    with torch.device("meta"):
        model = TransformerVQ(PRESETS[name].model)
    count = sum(x.numel() for x in model.state_dict().values())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)
    two_digits = f"{float(f'{count:.1e}') / 1e6:.0f}M"
    assert paper in (two_digits, f"{float(f'{count:.1e}') / 1e9:.1f}B")


@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True, "absolute_positions": True}])
def test_a_saved_model_loads_with_config_weights_and_codebooks(tmp_path, overrides):
    model = TransformerVQ(tiny_config(**overrides))
    model.update_codebooks(model(tokens(2, 20)).code_usage)
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = TransformerVQ.load(path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_is_not_a_model_is_rejected_by_name(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        TransformerVQ.load(path)
    with pytest.raises(FileNotFoundError):
        TransformerVQ.load(tmp_path / "absent")


def rewrite(path, name, change):
    """Change one tensor of a model file; its checksum fits."""
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors | {name: change(tensors[name])}, metadata)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["head.bias", "branches.0.quantizer.c_sum", "branches.1.u"])
def test_load_reports_weights_and_codebooks_that_are_not_finite(tmp_path, name, value):
    make().save(path := tmp_path / "model.safetensors")
    rewrite(path, name, lambda x: x.index_fill(-1, torch.tensor([1]), value))
    with pytest.raises(NotFiniteError, match=rf"model\.safetensors: {name} contains NaN"):
        TransformerVQ.load(path)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("embed.weight", torch.int8, torch.float32),
        ("branches.0.q_proj.weight", torch.bool, torch.float32),
        ("branches.1.u", torch.float64, torch.float32),
        ("branches.0.quantizer.c_sum", torch.int32, torch.float32),
        ("branches.0.quantizer.started", torch.float32, torch.bool),
    ],
)
def test_load_rejects_tensors_of_another_dtype(tmp_path, name, dtype, expected):
    make().float().save(path := tmp_path / "model.safetensors")
    rewrite(path, name, lambda x: x.to(dtype))
    with pytest.raises(UserError, match=rf"{name} is {dtype}, expected {expected}"):
        TransformerVQ.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("exact_codebooks", [True, False])
def test_load_keeps_the_dtype_of_the_model(tmp_path, dtype, exact_codebooks):
    model = make().to(dtype)
    for branch in model.branches:
        if exact_codebooks:
            branch.quantizer.float()
    model.save(tmp_path / "model")
    want = {name: x.dtype for name, x in model.state_dict().items()}
    found = TransformerVQ.load(tmp_path / "model").state_dict()
    assert {name: x.dtype for name, x in found.items()} == want


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), "shape"),
        (torch.zeros(0, 5, dtype=torch.int64), "shape"),
        (torch.zeros(2, 0, dtype=torch.int64), "shape"),
        (torch.zeros(2, 5), "want integers"),
        (torch.zeros(2, 5, dtype=torch.bool), "want integers"),
        (torch.tensor([[1, 99]]), "token 99 is outside the vocabulary of 17"),
        (torch.tensor([[1, -1]]), "token -1 is outside"),
    ],
)
def test_bad_tokens_are_rejected(bad, message):
    with pytest.raises(ValueError, match=message):
        make()(bad)


def test_bytes_are_tokens_too():
    x = tokens(2, 9)
    assert torch.equal(make()(x.to(torch.uint8)).logits, make()(x).logits)


def test_a_state_of_another_model_or_batch_is_rejected():
    model = make()
    with pytest.raises(ValueError, match="batch size of 3"):
        model(tokens(2, 5), model.init_state(3))
    with pytest.raises(ValueError, match="another model"):
        model(tokens(2, 5), make(n_layer=1).init_state(2))
    with pytest.raises(ValueError, match="another model"):
        model(tokens(2, 5), make(n_code=5).init_state(2))
    with pytest.raises(ValueError, match="at least 1"):
        model.init_state(0)


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_a_state_round_trips_through_named_tensors(attention, compressive_cache):
    config = tiny_config(
        attention=attention, compressive_cache=compressive_cache, p_dropsin=0.2, p_droplyr=0.2
    )
    model, x = TransformerVQ(config), tokens(2, 11)
    ids = torch.arange(11).expand(2, -1) // 6
    state = model(x, document_ids=ids).state.detach()
    tensors = state.to_tensors("a")
    again = ModelState.from_tensors(tensors | {"b/other": x}, "a")
    back = again.to_tensors("a")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    model.eval()
    more = {"document_ids": ids[:, -1:].expand(2, 11)}
    assert torch.equal(model(x, state, **more).logits, model(x, again, **more).logits)
