"""The Triton kernels equal their references in the interpreter, forward and backward.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    assert_bfloat16_close,
    assert_close,
    assert_equal_to_serial,
    assert_same_gradients,
    attention_inputs,
    tiny_model,
    training_results,
)
from interpreter import install_detectors
from test_fused import assert_assembled_states_equal

from transformer_vq.errors import UserError
from transformer_vq.generation.decoder import Decoder
from transformer_vq.nn.quantizer import nearest_code
from transformer_vq.ops import decode
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.decode import DecodeState, Step, Token
from transformer_vq.ops.triton import attention, launch
from transformer_vq.ops.triton.blocks import nearest_code as nearest_code_kernel
from transformer_vq.ops.triton.decode import attend_one_

HEADS = {"shga": (1, 1), "mqa": (1, 2), "mha": (2, 1), "gqa": (2, 2)}
SLOW = pytest.mark.slow
L = 18  # two tiles of 16 with an overhang


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    """Check every launch; large tiles are as many programs as small ones, but slower."""
    small = {
        name: tuple(replace(x, rows=16, columns=32, values=16) for x in tiles)
        for name, tiles in launch.TILES.items()
    }
    monkeypatch.setattr(launch, "TILES", small)
    install_detectors(monkeypatch)


equal = partial(assert_equal_to_serial, backend="triton")


def inputs_of(seq_len, heads="shga", *, b=1, d_v=6, d_k=5, seed=0):
    h, g = HEADS[heads]
    sizes = {"b": b, "h": h, "g": g, "d_k": d_k, "d_v": d_v, "n_code": 7, "block_len": L}
    return attention_inputs(seq_len, dtype=torch.float32, requires_grad=True, seed=seed, **sizes)


@pytest.mark.parametrize("heads", ["gqa", *(pytest.param(x, marks=SLOW) for x in ("mqa", "mha"))])
def test_weights_and_products_equal_plain_attention(heads):
    equal(inputs_of(2 * L + 1, heads))


@pytest.mark.parametrize("heads", [pytest.param("mqa", marks=SLOW), "gqa"])
def test_one_kernel_equals_plain_attention_for_narrow_values(monkeypatch, heads):
    def fail(*_):
        raise AssertionError("the weights are in memory")

    monkeypatch.setattr(attention, "_weighted_values", fail)
    equal(inputs_of(2 * L + 1, heads, d_v=5))


@pytest.mark.parametrize("d_v", [5, 6])
@pytest.mark.parametrize("seq_len", [1, L - 1, L])
def test_short_sequences(seq_len, d_v):
    equal(inputs_of(seq_len, d_v=d_v))


@pytest.mark.parametrize(
    ("options", "d_v"),
    [({}, 5), ({}, 6), ({"cache": False}, 5), ({"grad_through_cache": False}, 6)],
)
def test_a_carried_state_keeps_results_and_gradients(options, d_v):
    equal(inputs_of(3 * L + 3, d_v=d_v), (L + 1,), **options)


@pytest.mark.parametrize(
    ("ragged", "d_v"), [("documents", 6), ("both", 5), pytest.param("padding", 6, marks=SLOW)]
)
def test_documents_and_padding(ragged, d_v):
    seq_len = 3 * L + 2
    inputs = inputs_of(seq_len, b=2, d_v=d_v, seed=3)
    starts = torch.zeros(2, seq_len, dtype=torch.bool)
    starts[0, [5, L, 2 * L + 4]] = True
    starts[1, [L + 7]] = True
    valid = torch.arange(seq_len) < torch.tensor([[seq_len], [seq_len - 9]])
    equal(
        inputs,
        (2 * L,),
        document_ids=starts.cumsum(1) if ragged != "padding" else None,
        valid=valid if ragged != "documents" else None,
    )


def test_positional_scores_are_optional():
    inputs = inputs_of(L + 2)
    q, k_hat, z, v, codebook, _ = inputs.part(0, L + 2)
    state = inputs.empty_state()
    leaves = {"q": inputs.q, "k": inputs.k_hat, "v": inputs.v}
    got, _ = vq_attention(q, k_hat, z, v, codebook, None, state, backend="triton")
    want, _ = vq_attention(q, k_hat, z, v, codebook, None, state, reduction="serial")
    assert_close("output", got, want)
    assert_same_gradients(leaves, got, want)


def test_states_assembled_by_hand_equal_the_reference():
    assert_assembled_states_equal(inputs_of(27, b=2), (6,), backend="triton")


@pytest.mark.parametrize("d_v", [16, 24])
def test_bfloat16_is_close_to_float64(d_v):
    sizes = {"b": 1, "block_len": L, "d_k": 16, "d_v": d_v}
    low = attention_inputs(L + 3, dtype=torch.bfloat16, requires_grad=True, **sizes)
    assert_bfloat16_close(low, backend="triton")


def equal_to_the_reference(inputs, start, state, has_keys, dtype=None, has_bias=True):
    """Decode all tokens from `start` on with both, and compare outputs and states."""
    codebook = inputs.codebook
    # Keys of another codebook are kept: all states have them, and are dropped below.
    reference = DecodeState.of([state], [codebook + 1], dtype)
    reference = reference if has_keys else replace(reference, k=None)
    state = deepcopy(reference)
    for t in range(start, inputs.z.shape[-1]):
        q, k_hat, z, v, codebook, by_distance = inputs.part(t, t + 1)
        q, k_hat, v, by_distance = (x[..., 0, :] for x in (q, k_hat, v, by_distance))
        bias = by_distance if has_bias else None
        token = Token(q @ codebook.mT, bias, z[..., 0], v, q, k_hat)
        want = decode.attend_one_(token, 0, Step.start_(reference))
        got = attend_one_(token, 0, Step.start_(state))
        assert got.dtype == want.dtype
        assert_close("output", got.float(), want.float(), 1e-5 if dtype is None else 1e-2)
        for a, b in zip(state.tensors(), reference.tensors(), strict=True):
            if a.dtype == torch.bfloat16:  # the interpreter truncates instead of rounding
                torch.testing.assert_close(a, b, rtol=2**-7, atol=0)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("heads", "cache", "has_keys"),
    [
        ("shga", True, True),
        ("gqa", True, False),
        ("shga", False, False),
        *(
            pytest.param(heads, cache, has_keys, marks=SLOW)
            for heads in ("mha", "mqa", "gqa")
            for cache, has_keys in ((True, True), (False, False))
        ),
    ],
)
def test_decoding_equals_the_reference(heads, cache, has_keys):
    """Rows at different positions; enough tokens for the slots to wrap and tokens to be evicted."""
    h, g = HEADS[heads]
    n = 9 if heads == "shga" else 3
    sizes = {"h": h, "g": g, "d_v": 20, "block_len": 3, "dtype": torch.float32}
    inputs = attention_inputs(4 + n, **sizes)
    _, state = vq_attention(*inputs.part(0, 4), inputs.empty_state(cache), reduction="serial")
    state = state.reset(torch.tensor([False, True]))
    equal_to_the_reference(inputs, 4, state, has_keys)


def test_positional_scores_are_optional_in_decoding():
    inputs = attention_inputs(6, d_v=20, block_len=3, dtype=torch.float32)
    equal_to_the_reference(inputs, 0, inputs.empty_state(), has_keys=False, has_bias=False)


def test_a_bfloat16_state_keeps_its_means_in_float32():
    inputs = attention_inputs(7, d_v=20, block_len=3, dtype=torch.float32)
    inputs = replace(inputs, v=inputs.v.bfloat16().float())
    equal_to_the_reference(inputs, 0, inputs.empty_state(), has_keys=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_a_model_decodes_with_the_kernel(compiled, monkeypatch):
    model = tiny_model(n_layer=1).float().eval()
    tokens = torch.randint(17, (2, 9))
    want = model(tokens).logits[:, 3:]
    state = model(tokens[:, :3]).state
    model.set_execution(backend="triton")
    step = Decoder(model, state).step
    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    launches, run = [], launch.run
    with monkeypatch.context() as patch:
        patch.setattr(launch, "run", lambda call: (launches.append(call), run(call)))
        got = torch.stack([step(tokens[:, i]) for i in range(3, 9)], 1)
    assert_close("logits", got, want, 1e-5)
    assert len(launches) == 6 * len(state.layers)


@pytest.mark.parametrize(("seq_len", "n_code", "d_k"), [(1, 1, 1), (70, 70, 5), (64, 64, 16)])
def test_codes_are_exact(seq_len, n_code, d_k):
    k, codebook = torch.randn(2, 2, seq_len, d_k), torch.randn(2, n_code, d_k)
    assert torch.equal(nearest_code_kernel(k, codebook), nearest_code(k, codebook))


def test_the_first_of_equal_codes_wins():
    codebook = torch.tensor([[[1.0], [0.0], [1.0], [0.0]]]).repeat(1, 20, 1)
    k = torch.tensor([0.9, 0.1, 0.4]).view(1, 1, 3, 1)
    assert nearest_code_kernel(k, codebook).flatten().tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("head_type", ["shga", "gqa"])  # wide values, and the single kernel
def test_a_model_equals_the_plain_one(head_type):
    sizes = {"seq_len": 9, "dtype": torch.float32, "head_type": head_type}
    got = training_results(backend="triton", **sizes)
    for name, want in training_results(reduction="serial", **sizes).items():
        assert_close(name, got[name], want)


def test_unsupported_cases_are_rejected():
    q, k, v = torch.zeros(1, 1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    z, codebook = torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(1, 4, 2)
    with pytest.raises(UserError, match="phi"):
        vq_attention(q, k, z, v, codebook, block_len=2, backend="triton", phi=torch.relu)
    arguments = [x.double() for x in (q, k)] + [z] + [x.double() for x in (v, codebook)]
    with pytest.raises(UserError, match="float64"):
        vq_attention(*arguments, block_len=2, backend="triton")
