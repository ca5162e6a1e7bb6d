"""The layers against Definition 3.1 written out from their weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_gradients, block_starts

from transformer_vq import FullAttention, VQAttention
from transformer_vq.ops.position import sinusoids
from transformer_vq.ops.runtime import EXECUTIONS, Execution

D_MODEL, D_K, N_CODE, L = 16, 4, 7, 4
HEAD_TYPES = ["shga", "mqa", "mha", "gqa"]
REDUCTIONS = ["auto", "serial", "matmul", "associative", "input_scan"]


def make(kind: str, head_type: str, **options) -> VQAttention | FullAttention:
    if kind == "vq":
        options = {"n_code": N_CODE, "block_len": L} | options
    layer = {"vq": VQAttention, "full": FullAttention}[kind]
    if head_type == "gqa":
        options["n_kv_head"] = 2
    layer = layer(D_MODEL, head_type=head_type, d_k=D_K, **options).double()
    with torch.no_grad():  # u and v start at zero, where a mistake in them would not show
        layer.u.normal_()
        layer.v.normal_()
    return layer


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def definition(layer, x: torch.Tensor, head_type: str, starts: torch.Tensor) -> torch.Tensor:
    """Definition 3.1 from the weights, one query head at a time: the residual branch."""
    seq_len = x.shape[1]
    tau = D_K**0.5
    is_vq = isinstance(layer, VQAttention)
    x = norm(x)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)[None, :]
    table = sinusoids(torch.arange(seq_len), D_MODEL, 1e5, torch.float64)
    n_query_head = 1 if head_type == "shga" else D_MODEL // D_K
    n_per_key_head = {"mha": 1, "gqa": n_query_head // 2}.get(head_type, n_query_head)
    outputs = []
    for n in range(n_query_head):
        kv = n // n_per_key_head
        at, kv_at = slice(n * D_K, (n + 1) * D_K), slice(kv * D_K, (kv + 1) * D_K)
        values = v if head_type == "shga" else v[..., kv_at]
        q_n, k_n = norm(q[..., at]) * tau**-0.5, norm(k[..., kv_at]) * tau**-0.5
        u = layer.u.flatten()[at] * tau**-0.5
        v_bias = layer.v.flatten()[at] * tau**-0.5
        r = table @ layer.r_proj.weight[kv_at].T * tau**-0.5
        if is_vq:
            codebook = layer.quantizer.codebook[kv]
            z = torch.cdist(k_n, codebook[None]).argmin(-1)
            k_n = k_n + (codebook[z] - k_n).detach()
        scores = torch.einsum("bik,bjk->bij", q_n + u, k_n)
        if is_vq:
            stopped = torch.einsum("bik,bjk->bij", q_n + u, k_n.detach())
            live = torch.arange(seq_len)[None, :] >= starts[:, None] - L
            scores = torch.where(live, scores, stopped)
        bias = torch.einsum("bik,ijk->bij", q_n + v_bias, r[distance.clamp(min=0)])
        scores = scores + (bias * (distance <= L) if is_vq else bias)
        scores = scores.masked_fill(distance < 0, -torch.inf)
        weighted = scores.softmax(-1) @ (F.silu(values) if head_type == "shga" else values)
        outputs.append(weighted * F.silu(layer.g_proj(x)) if head_type == "shga" else weighted)
    return layer.o_proj(torch.cat(outputs, dim=-1))


def assert_layer_is_the_definition(layer, head_type, seq_len, cuts=()):
    x = torch.randn(2, seq_len, D_MODEL, dtype=torch.float64, requires_grad=True)
    state, parts = None, []
    edges = [0, *cuts, seq_len]
    for start, stop in itertools.pairwise(edges):
        output = layer(x[:, start:stop], state)
        state = output.state
        parts.append(output.y)
    got = torch.cat(parts, dim=1)
    want = definition(layer, x, head_type, block_starts(seq_len, L, cuts))
    assert_close("output", got, want)
    leaves = {"x": x} | dict(layer.named_parameters())
    assert_same_gradients(leaves, got, want)


@pytest.mark.parametrize(
    ("seq_len", "cuts"), [(1, ()), (3, (2,)), (4, ()), (17, (2, 9)), (28, ()), (28, (2, 9))]
)
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_vq_attention_is_definition_3_1(reduction, head_type, seq_len, cuts):
    layer = make("vq", head_type, reduction=reduction)
    assert_layer_is_the_definition(layer, head_type, seq_len, cuts)


@pytest.mark.parametrize("cuts", [(), (2, 9)])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_full_attention_is_definition_3_1_without_quantization(head_type, cuts):
    assert_layer_is_the_definition(make("full", head_type), head_type, 17, cuts)


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_auto_processes_long_inputs_in_segments(monkeypatch, checkpoint_activations):
    """Small segments, so that a short sequence has several."""
    small = Execution(2 * 4 * (N_CODE + 2 * L) * 2 * L, 256, compile=False)
    monkeypatch.setitem(EXECUTIONS, "cpu", small)
    layer = make("vq", "mha", reduction="auto", checkpoint_activations=checkpoint_activations)
    assert layer.segment_len(2, 100) == 2 * L
    assert_layer_is_the_definition(layer, "mha", 27)


@pytest.mark.parametrize("kind", ["vq", "full"])
def test_the_sinusoid_mask_is_kept_for_a_sequence(kind):
    layer = make(kind, "shga", p_dropsin=0.5)
    x = torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    first = layer(x).state
    second = layer(x, first).state
    n = first.sinusoid_mask.shape[0]
    assert torch.equal(second.sinusoid_mask[-n:], first.sinusoid_mask)
    assert 0.3 < float(first.sinusoid_mask.double().mean()) < 0.7
    everyone = torch.tensor([True, True])
    fresh = layer(x, first.reset(everyone)).state
    assert not torch.equal(fresh.sinusoid_mask[-n:], first.sinusoid_mask)
    one = layer(x, first.reset(~everyone)).state
    assert torch.equal(one.sinusoid_mask[-n:], first.sinusoid_mask)
    layer.eval()
    assert layer(x).state.sinusoid_mask is None
    assert layer(x, first).state.sinusoid_mask is None


def test_the_sinusoid_mask_is_inverted_dropout_on_the_table():
    layer = make("vq", "shga", p_dropsin=0.25)
    q = torch.randn(1, 1, 1, 3, D_K, dtype=torch.float64)
    table, keep = layer.sinusoids(layer.init_state(1), 1), torch.rand(L + 1, D_MODEL) < 0.75
    r = (table * keep / 0.75) @ layer.r_proj.weight.T * D_K**-0.25
    assert_close("scores", layer.by_distance(q, table, keep), q @ r.T)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 5), "want"), ((2, 0, D_MODEL), "tokens >= 1"), ((2, 5, D_MODEL + 1), str(D_MODEL))],
)
def test_input_of_another_shape_is_rejected(shape, message):
    with pytest.raises(ValueError, match=message):
        make("vq", "shga")(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["vq", "full"])
def test_a_state_of_another_batch_or_layer_is_rejected(kind):
    layer = make(kind, "mha")
    x = torch.zeros(2, 5, D_MODEL, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"batch size of 3.*2 rows"):
        layer(x, layer.init_state(3))
    with pytest.raises(ValueError, match="another model"):
        layer(x, make(kind, "mqa").init_state(2))
    other = make("full" if kind == "vq" else "vq", "mha")
    with pytest.raises(ValueError, match="another model"):
        layer(x, other.init_state(2))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (VQAttention, {"head_type": "both"}, "choose"),
        (VQAttention, {"head_type": "gqa", "d_k": 4}, "n_kv_head"),
        (VQAttention, {"reduction": "sum"}, "reduction"),
        (VQAttention, {"block_len": 0}, "block_len"),
        (FullAttention, {"head_type": "mha", "d_k": 5}, "multiple"),
    ],
)
def test_impossible_layers_are_rejected(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(12, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("shga", 1, 1, 128)),
        ({"n_head": 1}, ("shga", 1, 1, 128)),
        ({"n_head": 8}, ("mha", 8, 8, 8)),
        ({"n_head": 8, "d_k": 16}, ("mha", 8, 8, 16)),
        ({"n_head": 8, "n_kv_head": 2}, ("gqa", 8, 2, 8)),
        ({"head_type": "mha"}, ("mha", 1, 1, 64)),
        ({"head_type": "mqa", "n_head": 4}, ("mqa", 4, 1, 16)),
        ({"head_type": "gqa", "n_kv_head": 2}, ("gqa", 2, 2, 32)),
        ({"n_kv_head": 4}, ("gqa", 4, 4, 16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("layer_type", [VQAttention, FullAttention])
def test_heads_that_are_not_given_fit_the_width(layer_type, options, expected):
    layer = layer_type(64, **options)
    heads = layer.heads
    found = (layer.config.head_type, heads.n_head, heads.n_kv_head, heads.d_k)
    assert found == expected
    assert layer(torch.randn(1, 3, 64)).y.shape == (1, 3, 64)


def test_heads_and_widths_can_be_chosen_freely():
    """Eight heads whose widths do not add up to d_model, values wider than keys, no input norm."""
    options = {"head_type": "gqa", "n_head": 8, "n_kv_head": 4, "d_k": 3, "d_v": 5, "n_code": 6}
    layer = VQAttention(16, block_len=4, norm_input=False, **options).double().eval()
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    whole = layer(x)
    first = layer(x[:, :9])
    second = layer(x[:, 9:], first.state)
    assert_close("output", torch.cat([first.y, second.y], dim=1), whole.y)
    assert whole.state.k.shape == (2, 4, 4, 3)
    assert whole.state.cache.mean.shape == (2, 4, 6, 5)
    scaled = layer(3 * x).y
    assert not torch.allclose(scaled, whole.y)  # with the norm, only eps would make a difference
    normed = VQAttention(16, block_len=4, **options).double().eval()
    assert_close("normed", normed(3 * x).y, normed(x).y, tolerance=1e-5)
