"""Inspection agrees with Definition 3.1 in O(T^2), written here once more with plain loops."""

import json
import math
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_vq import prefill
from transformer_vq.errors import UserError
from transformer_vq.generation.inspection import (
    Inspection,
    LayerInspection,
    inspect_tokens,
    positions_with_same_code,
)
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.quantizer import NotFiniteError

BLOCK_LEN = 4
TOKENS = [0, *(int(i * i + 3 * i) % 17 for i in range(22))]  # five blocks of 4, and 3 more tokens
KINDS = {
    "shga": {"head_type": "shga"},
    "mqa": {"head_type": "mqa"},
    "mha": {"head_type": "mha"},
    "gqa": {"head_type": "gqa"},
    "large": {"tie_embeddings": True, "final_norm": True, "logit_scale": 0.3},
    "image": {"absolute_positions": True},
    "window": {"head_type": "gqa", "compressive_cache": False},
}


def make(**overrides):
    """Return a model in float64 whose zero-initialized parameters are random as well."""
    model = tiny_model(**({"n_layer": 1} | overrides)).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".u", ".v", "scale")):
            torch.nn.init.normal_(parameter)
    return model


@dataclass
class Reference:
    """logits: [t, vocab_size]; per attention layer weights: [h, g, t, t], codes: [h, t]."""

    logits: Tensor
    weights: list[Tensor]
    codes: list[Tensor]


@torch.no_grad()
def reference(model, tokens) -> Reference:
    """Run the model with a T x T matrix of weights for each head."""
    x = model.embed.weight[torch.tensor(tokens)]
    if model.positions is not None:
        x = x + model.positions.scale * sinusoids(torch.arange(len(tokens)), x.shape[-1])
    weights, codes = [], []
    for branch in model.branches:
        if isinstance(branch, VQAttention):
            y, of_layer, z = quadratic_layer(branch, x)
            weights.append(of_layer)
            codes.append(z)
        else:
            y = F.relu(normed(x) @ branch.in_proj.weight.T).square() @ branch.out_proj.weight.T
        x = x + y
    x = (normed(x) if model.config.final_norm else x) * model.config.logit_scale
    bias = 0.0 if model.head.bias is None else model.head.bias
    return Reference(x @ model.head.weight.T + bias, weights, codes)


def quadratic_layer(layer, x):
    """Return the residual branch, the weights and the codes of Definition 3.1."""
    n_head, n_group, d_k, seq_len = layer.n_kv_head, layer.n_group, layer.d_k, len(x)
    scale, x = d_k**-0.25, normed(x)
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    table = sinusoids(torch.arange(seq_len), x.shape[-1])
    out, weights, codes = [], torch.zeros(n_head, n_group, seq_len, seq_len).double(), []
    for head in range(n_head):
        rows = slice(head * d_k, (head + 1) * d_k)
        k = normed(x @ layer.k_proj.weight[rows].T) * scale
        r = table @ layer.r_proj.weight[rows].T * scale
        codebook = layer.quantizer.c_sum[head] / layer.quantizer.c_count[head].unsqueeze(-1)
        z = torch.cdist(k, codebook).argmin(-1)
        value_rows = slice(head * layer.d_v, (head + 1) * layer.d_v)
        value = x @ layer.v_proj.weight[value_rows].T
        value = value if layer.g_proj is None else F.silu(value)
        for group in range(n_group):
            first = (head * n_group + group) * d_k
            q = normed(x @ layer.q_proj.weight[first : first + d_k].T)
            u, v = layer.u[first : first + d_k], layer.v[first : first + d_k]
            scores = (q + u) * scale @ codebook[z].T
            bias = ((q + v) * scale @ r.T).gather(-1, distance.clamp(min=0))
            scores = scores + torch.where(distance <= BLOCK_LEN, bias, 0.0)
            if not layer.config.compressive_cache:
                scores = scores.masked_fill(distance > BLOCK_LEN, -torch.inf)
            scores = scores.masked_fill(distance < 0, -torch.inf)
            weights[head, group] = scores.softmax(-1)
            out.append(weights[head, group] @ value)
        codes.append(z)
    o = torch.cat(out, dim=-1)
    o = o if layer.g_proj is None else o * F.silu(x @ layer.g_proj.weight.T)
    return o @ layer.o_proj.weight.T, weights, torch.stack(codes)


def normed(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def sinusoids(positions, width):
    angles = positions[:, None] * 1e5 ** -(torch.arange(0, width, 2).double() / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def grouped(weights, codes, n_code):
    """Return the shares of window and cache, and the weight of each code of the cache."""
    weights = weights.mean(1)
    n_head, seq_len, _ = weights.shape
    shares = torch.zeros(2, n_head, seq_len).double()
    of_code = torch.zeros(n_head, seq_len, n_code).double()
    for head in range(n_head):
        for i in range(seq_len):
            for j in range(i + 1):
                is_old = i - j > BLOCK_LEN
                shares[int(is_old), head, i] += weights[head, i, j]
                if is_old:
                    of_code[head, i, codes[head, j]] += weights[head, i, j]
    return shares, of_code


@pytest.mark.parametrize("kind", KINDS)
def test_inspection_equals_the_quadratic_reference(kind):
    model = make(n_layer=2, **KINDS[kind])
    n_code = model.config.n_code
    inspection, want = inspect_tokens(model, TOKENS, n_codes=3), reference(model, TOKENS)
    assert len(inspection.layers) == len(want.weights)
    bits = -want.logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]] / math.log(2)
    assert_close("surprisal", inspection.surprisal[1:], bits)
    for got, weights, codes in zip(inspection.layers, want.weights, want.codes, strict=True):
        (window, cache), of_code = grouped(weights, codes, n_code)
        assert torch.equal(got.codes, codes)
        assert_close("window", got.window, window)
        assert_close("cache", got.cache, cache)
        assert_close("top weights", got.top_weights, of_code.topk(3).values)
        assert_close("weights of the top codes", of_code.gather(-1, got.top_codes), got.top_weights)


@pytest.mark.parametrize("n_before", [1, 2, 4, 7, 8, 13, 22])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_after_a_context_equal_those_of_the_whole_sequence(kind, n_before):
    model = make(n_layer=2, **KINDS[kind])
    whole = inspect_tokens(model, TOKENS, n_codes=3)
    context = prefill(model, [TOKENS[:n_before]])
    rest = inspect_tokens(model, TOKENS[n_before:], context=context, n_codes=3)
    assert_close("surprisal", rest.surprisal, whole.surprisal[n_before:])
    for got, want in zip(rest.layers, whole.layers, strict=True):
        assert torch.equal(got.codes, want.codes[:, n_before:])
        for name in ("window", "cache", "top_weights"):
            assert_close(name, getattr(got, name), getattr(want, name)[:, n_before:])


def test_context_is_not_changed_and_must_have_one_row():
    model = make()
    context = prefill(model, [TOKENS])
    before = {name: x.clone() for name, x in context.state.to_tensors().items()}
    inspect_tokens(model, TOKENS, context=context)
    assert all(torch.equal(x, before[name]) for name, x in context.state.to_tensors().items())
    with pytest.raises(UserError, match="has 2 rows"):
        inspect_tokens(model, TOKENS, context=context.repeat(2))


def test_window_without_a_cache_has_no_weight_on_older_tokens():
    layers = inspect_tokens(make(compressive_cache=False), TOKENS).layers
    for layer in layers:
        assert not layer.cache.any()
        assert not layer.top_weights.any()
        torch.testing.assert_close(layer.window, torch.ones_like(layer.window))


@pytest.mark.parametrize("kind", KINDS)
def test_shares_sum_to_one(kind):
    for layer in inspect_tokens(make(**KINDS[kind]).float(), TOKENS).layers:
        total = layer.window + layer.cache
        torch.testing.assert_close(total, torch.ones_like(total))


def test_weights_of_all_codes_sum_to_the_share_of_the_cache():
    for layer in inspect_tokens(make(), TOKENS, n_codes=100).layers:
        assert layer.top_weights.shape[-1] == 7
        assert_close("cache", layer.top_weights.sum(-1), layer.cache)


def test_cache_is_empty_until_tokens_are_older_than_the_window():
    for layer in inspect_tokens(make(), TOKENS).layers:
        assert not layer.top_weights[:, : BLOCK_LEN + 1].any()
        assert (layer.top_weights[:, BLOCK_LEN + 1 :, 0] > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("seq_len", [1, 3, 4, 5, 23])
def test_surprisal_comes_from_the_logits_of_the_model(seq_len):
    model, tokens = make(head_type="mha"), TOKENS[:seq_len]
    inspection = inspect_tokens(model, tokens)
    p = model(torch.tensor([tokens])).logits[0].softmax(-1)
    assert inspection.surprisal.shape == (seq_len,)
    assert inspection.surprisal[0].isnan()
    bits = -p[range(seq_len - 1), tokens[1:]].log2()
    torch.testing.assert_close(inspection.surprisal[1:], bits)


def test_shapes_and_types_follow_the_model():
    inspection = inspect_tokens(make(head_type="gqa", n_layer=3).float(), TOKENS, n_codes=2)
    assert inspection.surprisal.dtype == torch.float32
    assert len(inspection.layers) == 3
    for layer in inspection.layers:
        assert layer.codes.shape == layer.window.shape == (2, 23)
        assert layer.top_codes.shape == layer.top_weights.shape == (2, 23, 2)
        assert layer.codes.dtype == layer.top_codes.dtype == torch.int64
        assert layer.cache.dtype == layer.top_weights.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_no_tensor_has_an_entry_per_pair_of_tokens():
    tokens = TOKENS * 4
    with LargestTensor() as mode:
        inspect_tokens(make(head_type="mqa"), tokens)
    assert len(tokens) <= mode.numel < len(tokens) ** 2 / 4


def same(a: Inspection, b: Inspection) -> bool:
    """Return whether two inspections are bitwise equal."""
    pairs = zip(a.layers, b.layers, strict=True)
    names = [field.name for field in fields(LayerInspection)]
    return torch.equal(a.surprisal[1:], b.surprisal[1:]) and all(
        torch.equal(getattr(x, name), getattr(y, name)) for x, y in pairs for name in names
    )


def test_training_mode_and_hooks_are_restored():
    model = make(p_dropsin=0.5, p_dropres=0.5, p_droplyr=0.5)
    want = inspect_tokens(model, TOKENS)
    assert not model.training
    model.train()
    assert same(inspect_tokens(model, TOKENS), want)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert not want.surprisal.requires_grad
    assert not want.layers[0].cache.requires_grad


def test_training_mode_and_hooks_are_restored_after_an_error():
    model = make().train()
    torch.nn.init.constant_(model.embed.weight, torch.nan)
    with pytest.raises(NotFiniteError):
        inspect_tokens(model, TOKENS)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "convert", [tuple, np.array, torch.tensor], ids=["tuple", "numpy", "torch"]
)
def test_tokens_may_be_any_sequence_of_integers(convert):
    model = make()
    assert same(inspect_tokens(model, convert(TOKENS)), inspect_tokens(model, TOKENS))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([3, 17], {}, "token 17 is outside the vocabulary of 17"),
        ([3, -1], {}, "token -1 is outside the vocabulary of 17"),
        ([2**70], {}, "outside the vocabulary"),
        ("text", {}, "token ids"),
        ([1.5], {}, "token ids"),
        ([[1, 2], [3, 4]], {}, "token ids"),
        ([1], {"n_codes": 0}, "n_codes=0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(tokens, options, message):
    with pytest.raises(UserError, match=message) as caught:
        inspect_tokens(make(), tokens, **options)
    assert "\n" not in str(caught.value)


def test_full_attention_is_rejected_because_it_has_no_codes():
    with pytest.raises(UserError, match="has no codes") as caught:
        inspect_tokens(make(attention="full"), TOKENS)
    assert "\n" not in str(caught.value)


def test_to_dict_is_json_with_rounded_numbers():
    inspection = inspect_tokens(make(head_type="gqa").float(), TOKENS, n_codes=2)
    record = inspection.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record) == {"surprisal", "layers"}
    want = [round(x, 3) for x in inspection.surprisal[1:].tolist()]
    assert record["surprisal"] == [None, *want]
    for got, layer in zip(record["layers"], inspection.layers, strict=True):
        assert set(got) == {field.name for field in fields(LayerInspection)}
        assert got["codes"] == layer.codes.tolist()
        assert got["top_codes"] == layer.top_codes.tolist()
        for name in ("window", "cache"):
            rows = getattr(layer, name).tolist()
            assert got[name] == [[round(x, 4) for x in row] for row in rows]
        assert got["top_weights"][1][22] == [round(x, 4) for x in layer.top_weights[1, 22].tolist()]


def test_positions_with_same_code_are_the_earlier_ones():
    inspection = inspect_tokens(make(head_type="gqa", n_layer=2), TOKENS)
    codes = inspection.layers[1].codes[1].tolist()
    n_found = 0
    for position, code in enumerate(codes):
        found = positions_with_same_code(inspection, 1, 1, position)
        assert found == [i for i in range(position) if codes[i] == code]
        n_found += len(found)
    assert n_found > 0


@pytest.mark.parametrize("where", [(2, 0, 0), (0, 1, 0), (0, 0, 23), (0, 0, -1)])
def test_positions_outside_the_inspection_are_rejected(where):
    inspection = inspect_tokens(make(head_type="mqa"), TOKENS)
    with pytest.raises(UserError, match=r"=-?\d+: choose 0 to \d+"):
        positions_with_same_code(inspection, *where)
