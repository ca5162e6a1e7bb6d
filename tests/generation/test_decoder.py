"""Decoding in place equals the forward, token by token."""

import pytest
import torch
from helpers import assert_close, tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.generation.decoder import Decoder

HEADS = ["shga", "mqa", "mha", "gqa"]


def make(dtype=torch.float64, seed=3, **overrides):
    torch.manual_seed(seed)
    return TransformerVQ(tiny_config(**overrides)).to(dtype).eval()


def decoded(decoder, tokens):
    """The logits after each token. tokens: [b, t]."""
    return torch.stack([decoder.step(token) for token in tokens.T], 1)


@pytest.mark.parametrize(
    "options",
    [
        *({"head_type": head} for head in HEADS),
        *({"head_type": head, "compressive_cache": False} for head in HEADS),
        {"absolute_positions": True},
        {"tie_embeddings": True, "final_norm": True, "logit_scale": 0.1},
        {"p_dropsin": 0.3, "p_dropres": 0.3, "p_droplyr": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("n_prompt", [0, 3, 4, 14])
def test_decoding_equals_the_forward(options, n_prompt):
    model = make(**options)
    if model.positions is not None:
        torch.nn.init.ones_(model.positions.scale)
    tokens = torch.randint(17, (3, n_prompt + 15))
    state = model(tokens[:, :n_prompt]).state if n_prompt else model.init_state(3)
    got = decoded(Decoder(model, state), tokens[:, n_prompt:])
    assert_close("logits", got, model(tokens).logits[:, n_prompt:], 1e-12)


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_rows_may_be_at_different_positions(attention):
    model = make(attention=attention)
    tokens = torch.randint(17, (2, 25))
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1, :8] = False
    state = model(tokens[:, :10], valid=valid).state
    got = decoded(Decoder(model, state, room=15), tokens[:, 10:])
    assert_close("row 0", got[0], model(tokens[:1]).logits[0, 10:], 1e-12)
    assert_close("row 1", got[1], model(tokens[1:, 8:]).logits[0, 2:], 1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_float32_and_bfloat16_are_close_to_float64(dtype, tolerance, seed):
    model = make(dtype, seed, n_layer=1)
    tokens = torch.randint(17, (2, 40))
    got = decoded(Decoder(model, model(tokens[:, :9]).state), tokens[:, 9:])
    assert_close("logits", got, model(tokens).logits[:, 9:], tolerance)


@pytest.mark.parametrize("n", [1, 3, 4, 11])
def test_the_returned_state_equals_that_of_the_forward(n):
    model = make()
    tokens = torch.randint(17, (2, 6 + n))
    decoder = Decoder(model, model(tokens[:, :6]).state)
    decoded(decoder, tokens[:, 6:])
    got, want = decoder.state(), model(tokens).state
    assert torch.equal(got.position, want.position)
    more = torch.randint(17, (2, 9))
    assert_close("later", model(more, got).logits, model(more, want).logits, 1e-12)
    for a, b in zip(got.layers, want.layers, strict=True):
        assert torch.equal(a.z, b.z)
        assert torch.equal(a.cache.count, b.cache.count)


def test_the_given_state_is_not_modified():
    model = make()
    state = model(torch.randint(17, (2, 12))).state
    before = [x.clone() for x in (state.layers[0].k, state.layers[0].cache.mean, state.position)]
    decoder = Decoder(model, state)
    for _ in range(5):
        decoder.step(torch.tensor([1, 2]))
    after = [state.layers[0].k, state.layers[0].cache.mean, state.position]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("head_type", HEADS)
@pytest.mark.parametrize("n_prompt", [2, 9])
def test_keys_from_before_an_update_of_the_codebooks_are_kept(head_type, n_prompt):
    """Some keys in the window of such a state are not codewords of the new codebooks."""
    model = make(head_type=head_type)
    tokens = torch.randint(17, (2, n_prompt + 12))
    output = model(tokens[:, :n_prompt])
    model.update_codebooks(output.code_usage)
    decoder, state = Decoder(model, output.state), output.state
    for i in range(n_prompt, tokens.shape[1]):
        want = model(tokens[:, i : i + 1], state)
        state = want.state
        assert_close("logits", decoder.step(tokens[:, i]), want.logits[:, 0], 1e-12)
    assert_close("keys", decoder.state().layers[0].k, state.layers[0].k, 1e-12)


@pytest.mark.parametrize("head_type", HEADS)
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_rows_can_be_replaced_between_steps(head_type, compressive_cache):
    model = make(head_type=head_type, compressive_cache=compressive_cache)
    tokens = torch.randint(17, (3, 40))
    decoder = Decoder(model, model(tokens[:, :3]).state)
    decoded(decoder, tokens[:, 3:12])
    decoder.write_row_(1, model(tokens[1:2, :9]).state)
    got = decoded(decoder, tokens[:, 12:30])
    assert_close("other rows", got[::2], model(tokens[::2]).logits[:, 12:30], 1e-12)
    alone = torch.cat([tokens[1:2, :9], tokens[1:2, 12:30]], 1)
    assert_close("new row", got[1], model(alone).logits[0, 9:], 1e-12)
    want = model(alone).state.layers[0]
    assert_close("window", decoder.state().layers[0].v[1], want.v[0], 1e-12)
    if compressive_cache:
        assert torch.equal(decoder.state().layers[0].cache.count[1], want.cache.count[0])


@pytest.mark.parametrize("head_type", HEADS)
def test_a_row_is_computed_bitwise_the_same_whenever_it_was_written(head_type):
    model = make(torch.float32, head_type=head_type)
    tokens = torch.randint(17, (3, 24))
    state = model(tokens[1:2, :9]).state

    def decode(n_steps_before):
        decoder = Decoder(model, model.init_state(3))
        for i in range(n_steps_before):
            decoder.step(tokens[:, i])
        decoder.write_row_(1, state)
        return decoded(decoder, tokens[:, 9:])[1]

    want = decode(0)
    assert all(torch.equal(decode(n), want) for n in (1, 2, 6))


def test_a_bfloat16_state_is_close_to_float32_and_its_means_keep_moving():
    """A mean in bfloat16 would stop after 256 tokens of a code."""
    model = make(torch.float32, n_code=1, n_layer=1)
    tokens = torch.randint(17, (1, 600))
    decoder = Decoder(model, model.init_state(1), state_dtype=torch.bfloat16)
    got = decoded(decoder, tokens)
    want = model(tokens)
    assert_close("logits", got, want.logits, 1e-2)
    got, want = decoder.state().layers[0], want.state.layers[0]
    assert got.v.dtype == torch.float32
    assert torch.equal(got.cache.count, want.cache.count)
    assert_close("means", got.cache.mean, want.cache.mean, 1e-2)


@pytest.mark.parametrize("head_type", HEADS)
def test_autocast_computes_scores_in_float32(head_type):
    """Otherwise decoding would choose other codes than the forward."""
    model = make(torch.float32, head_type=head_type)
    tokens = torch.randint(17, (2, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(tokens)
        got = decoded(Decoder(model, model(tokens[:, :9]).state), tokens[:, 9:])
    assert_close("logits", got, want.logits[:, 9:], 2e-2)


@pytest.mark.parametrize("head_type", HEADS)
@pytest.mark.parametrize("n_prompt", [0, 1, 9])
def test_full_attention_decodes_within_its_room(head_type, n_prompt):
    model = make(attention="full", head_type=head_type)
    tokens = torch.randint(17, (2, n_prompt + 10))
    state = model(tokens[:, :n_prompt]).state if n_prompt else model.init_state(2)
    decoder = Decoder(model, state, room=10)
    got = decoded(decoder, tokens[:, n_prompt:])
    assert_close("logits", got, model(tokens).logits[:, n_prompt:], 1e-12)
    more = torch.randint(17, (2, 3))
    want = model(torch.cat([tokens, more], 1)).logits[:, -3:]
    assert_close("later", model(more, decoder.state()).logits, want, 1e-12)
    with pytest.raises(ValueError, match="no room for token"):
        decoder.step(tokens[:, 0])
