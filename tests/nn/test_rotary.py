"""Models with rotary positions: the definition, cuts, decoding, documents and padding."""

import pytest
import torch
from helpers import assert_close

from transformer_vq import ModelConfig, RotaryVQAttention, TransformerVQ
from transformer_vq.errors import UserError
from transformer_vq.generation.decoder import Decoder
from transformer_vq.nn.model import ModelState
from transformer_vq.ops.rotary import quadratic_rotary_attention, token_kind

EXACT = 1e-10
VARIANTS = {
    "gqa": {},
    "no slots": {"n_sink": 0, "n_exact": 0},
    "sinks": {"n_exact": 0},
    "exact slots": {"n_sink": 0, "n_exact": 4},
    "window and sinks only": {"compressive_cache": False, "n_exact": 0},
    "quantized window": {"quantize_window": True, "n_sink": 0, "n_exact": 0},
    "shga": {"head_type": "shga", "n_head": None, "n_kv_head": None, "feed_forward": "relu2"},
    "mqa, biases": {"head_type": "mqa", "n_kv_head": 1, "qk_norm": False, "proj_bias": "all"},
    "full": {"attention": "full", "n_sink": 0, "n_exact": 0, "quantize_window": True},
}


def make(**options):
    """Return a model in float64 in which about half of the tokens are worth a slot."""
    options = {
        **{"vocab_size": 17, "d_model": 32, "n_layer": 2, "head_type": "gqa", "n_head": 4},
        **{"n_kv_head": 2, "d_k": 8, "n_code": 6, "block_len": 5, "position": "rope"},
        **{"quantize_window": False, "n_sink": 2, "n_exact": 3, "norm_gain": True},
        **{"feed_forward": "swiglu", "final_norm": True, "codebook_init": "random"},
    } | options
    torch.manual_seed(0)
    model = TransformerVQ(ModelConfig(**options)).double().eval()
    for layer in model.codebook_layers():
        quantizer = layer.quantizer
        quantizer.code_bias.normal_()
        quantizer.metric.add_(torch.randn_like(quantizer.metric), alpha=0.2)
        x = torch.randn(1, 99, model.config.d_model, dtype=torch.float64)
        with torch.no_grad():
            error = quantizer(layer.keys_and_values(layer.norm(x))[0]).error
        layer.exact_above.copy_(error.median(-1).values[0])
    return model


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return make(**request.param)


def run(model, segments, **masks):
    """Return logits and state of a sequence in segments."""
    state, outputs, start = None, [], 0
    with torch.no_grad():
        for tokens in segments:
            columns = slice(start, start + tokens.shape[1])
            output = model(tokens, state, **{name: x[:, columns] for name, x in masks.items()})
            state, start = output.state, columns.stop
            outputs.append(output.logits)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("n_exact", [0, 1, 4, 50])
@pytest.mark.parametrize("lens", [[43], [4, 39], [1] * 43], ids=str)
def test_layer_equals_its_definition(n_exact, lens):
    layer = make(n_exact=n_exact).branches[0]
    assert isinstance(layer, RotaryVQAttention)
    x = torch.randn(2, 43, 32, dtype=torch.float64)
    state, outputs = None, []
    with torch.no_grad():
        for part in x.split(lens, 1):
            output = layer(part, state)
            state = output.state
            outputs.append(output.y)
        normed = layer.norm(x)
        q, (k, v) = layer.plain_queries(normed) * 8**-0.25, layer.keys_and_values(normed)
        quantized = layer.quantizer(k)
        steps = torch.arange(43).expand(2, -1)
        kind = token_kind(quantized.error, layer.exact_above, steps, 2, n_exact)
        assert n_exact == 0 or set(kind.unique().tolist()) == {0, 1, 2}
        bias = layer.quantizer.code_bias.double()[torch.arange(2)[:, None], quantized.z]
        sizes = {"window_len": 5, "far": 10, "n_exact": n_exact, "theta": 1e4}
        wv = quadratic_rotary_attention(q, k, quantized.k_hat, v, bias, kind, **sizes)
        assert_close("y", torch.cat(outputs, 1), layer.residual(wv, normed), EXACT)


@pytest.mark.parametrize("lens", [[1] * 43, [7, 36], [5, 5, 33], [20, 1, 22]], ids=str)
def test_output_does_not_depend_on_cuts(model, lens):
    tokens = torch.randint(17, (2, 43))
    assert_close("logits", run(model, tokens.split(lens, 1))[0], run(model, [tokens])[0], EXACT)


def test_decoder_equals_forward(model):
    tokens = torch.randint(17, (2, 40))
    want, state = run(model, [tokens])
    decoder = Decoder(model, run(model, [tokens[:, :13]])[1], room=40)
    got = torch.stack([decoder.step(tokens[:, i]) for i in range(13, 40)], dim=1)
    assert_close("logits", got, want[:, 13:], EXACT)
    restored = ModelState.from_tensors(decoder.state().to_tensors())
    more = torch.randint(17, (2, 9))
    assert_close("resumed", model(more, restored).logits, model(more, state).logits, EXACT)


def test_documents_are_independent(model):
    lens = [3, 22, 1, 14, 3]
    tokens = torch.randint(17, (2, sum(lens)))
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).expand(2, -1)
    want = torch.cat([run(model, [part])[0] for part in tokens.split(lens, 1)], dim=1)
    for cuts in ([43], [1] * 43, [10, 33], [6, 5, 32]):
        got = run(model, tokens.split(cuts, 1), document_ids=ids)[0]
        assert_close(f"logits, cuts {cuts}", got, want, EXACT)


def test_padding_is_ignored(model):
    tokens, valid = torch.randint(17, (3, 31)), torch.rand(3, 31) < 0.6
    valid[2] = False
    for cuts in ([31], [1] * 31, [4, 20, 7]):
        got = run(model, tokens.split(cuts, 1), valid=valid)[0]
        for row in range(2):
            kept = valid[row]
            want = run(model, [tokens[row : row + 1, kept]])[0][0]
            assert_close(f"row {row}, cuts {cuts}", got[row, kept], want, EXACT)


def test_state_has_a_constant_size():
    model = make()
    sizes = [run(model, [torch.randint(17, (1, n))])[1].n_bytes for n in (20, 200)]
    assert sizes[0] == sizes[1] == model.init_state(1).n_bytes


def test_gradients_reach_every_parameter_but_not_codebooks(model):
    model.train()
    output = model(torch.randint(17, (2, 33)))
    (output.logits.square().mean() + output.commit_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if output.code_usage:
        before = model.codebook_layers()[0].quantizer.codebook.clone()
        model.update_codebooks(output.code_usage)
        assert not model.codebook_layers()[0].quantizer.codebook.equal(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "xl"}, "position=xl does not use it"),
        ({"quantize_window": True}, "quantize_window=True does not use it"),
        ({"attention": "full"}, "attention=full does not use it"),
        ({"compressive_cache": False}, "n_exact=3 needs"),
        ({"d_k": 7}, "must be even"),
        ({"p_dropsin": 0.1}, "position=rope does not use it"),
        ({"head_type": "shga", "n_head": None, "n_kv_head": None}, "head_type=shga does not"),
    ],
)
def test_config_rejects_what_positions_do_not_use(options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


def test_backends_without_rotary_positions_are_rejected():
    config = make().config
    for options in ({"reduction": "matmul"}, {"reduction": "associative"}):
        with pytest.raises(UserError, match="not available"):
            TransformerVQ(config, **options)
