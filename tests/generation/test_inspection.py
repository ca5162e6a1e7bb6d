"""Inspection agrees with Definition 3.1 in O(T^2)."""

import json
import math

import pytest
import torch
from helpers import assert_close, tiny_model

from transformer_vq import prefill
from transformer_vq.errors import UserError
from transformer_vq.generation.inspection import inspect_tokens
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.ops.quadratic import distance_bias

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


@torch.no_grad()
def reference(model, tokens):
    """Weights of all pairs of tokens, [h, g, t, t], and codes, [h, t], of every attention layer."""
    found, hooks = [], []

    def note(layer, args, output):
        x = layer.norm(args[0])
        q, q_position = layer.queries(x)
        quantized = layer.quantizer(layer.keys_and_values(x)[0])
        table = layer.sinusoids(layer.init_state(1), len(tokens))
        by_distance = layer.by_distance(q_position, table, None)
        window_only = not layer.config.compressive_cache
        bias = distance_bias(by_distance, BLOCK_LEN, window_only=window_only)
        scores = torch.einsum("bhgik,bhjk->bhgij", q, quantized.k_hat) + bias
        found.append((scores.softmax(-1)[0], quantized.z[0]))

    for layer in model.branches:
        if isinstance(layer, VQAttention):
            hooks.append(layer.register_forward_hook(note))
    logits = model(torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, found


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
    inspection = inspect_tokens(model, TOKENS, n_codes=3)
    logits, layers = reference(model, TOKENS)
    bits = -logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]] / math.log(2)
    assert inspection.surprisal[0].isnan()
    assert_close("surprisal", inspection.surprisal[1:], bits)
    for got, (weights, codes) in zip(inspection.layers, layers, strict=True):
        (window, cache), of_code = grouped(weights, codes, n_code)
        assert torch.equal(got.codes, codes)
        assert_close("window", got.window, window)
        assert_close("cache", got.cache, cache)
        assert_close("top weights", got.top_weights, of_code.topk(3).values)
        assert_close("weights of the top codes", of_code.gather(-1, got.top_codes), got.top_weights)


@pytest.mark.parametrize("n_before", [1, 7, 22])
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


def test_training_mode_and_hooks_are_restored():
    model = make(p_dropsin=0.5, p_dropres=0.5, p_droplyr=0.5)
    want = inspect_tokens(model, TOKENS)
    assert not model.training
    model.train()
    got = inspect_tokens(model, TOKENS)
    assert torch.equal(got.surprisal[1:], want.surprisal[1:])
    assert torch.equal(got.layers[1].cache, want.layers[1].cache)
    torch.nn.init.constant_(model.embed.weight, torch.nan)
    with pytest.raises(NotFiniteError):
        inspect_tokens(model, TOKENS)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert not want.surprisal.requires_grad
    assert not want.layers[0].cache.requires_grad


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "a prompt has no tokens"),
        ([3, -1], {}, "token -1 is outside the vocabulary of 17"),
        ([[1, 2], [3, 4]], {}, "token ids"),
        ([1], {"n_codes": 0}, "n_codes=0: must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(tokens, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        inspect_tokens(make(), tokens, **options)
    assert "\n" not in str(caught.value)


def test_full_attention_is_rejected_because_it_has_no_codes():
    with pytest.raises(UserError, match="has no codes"):
        inspect_tokens(make(attention="full"), TOKENS)


def test_to_dict_is_json_with_rounded_numbers():
    inspection = inspect_tokens(make(head_type="gqa").float(), TOKENS, n_codes=2)
    record = inspection.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    want = [round(x, 3) for x in inspection.surprisal[1:].tolist()]
    assert record["surprisal"] == [None, *want]
    for got, layer in zip(record["layers"], inspection.layers, strict=True):
        assert got["codes"] == layer.codes.tolist()
        for name in ("window", "cache"):
            rows = getattr(layer, name).tolist()
            assert got[name] == [[round(x, 4) for x in row] for row in rows]
