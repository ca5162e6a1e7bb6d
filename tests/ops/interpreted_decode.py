"""The decode kernel equals `attend_one_`, token by token, in the interpreter.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close, attention_inputs, tiny_model
from interpreter import detectors

from transformer_vq.generation.decoder import Decoder
from transformer_vq.ops import decode
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.decode import DecodeState, Step, Token
from transformer_vq.ops.triton import launch
from transformer_vq.ops.triton.decode import attend_one_

L = 3
HEADS = {"shga": (1, 1), "mha": (2, 1), "mqa": (1, 3), "gqa": (2, 2)}


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    tiles = launch.TILES["decode_token"]
    small = tuple(replace(x, values=16) for x in tiles)
    monkeypatch.setitem(launch.TILES, "decode_token", small)
    with detectors():
        yield


def copy_of(state, has_keys):
    """Return a copy that keeps the keys of its window, or none."""
    copied = {}
    for name, x in vars(state).items():
        is_tuple = isinstance(x, tuple)
        copied[name] = tuple(y.clone() for y in x) if is_tuple else x if x is None else x.clone()
    return DecodeState(**copied | ({} if has_keys else {"k": None}))


def equal_to_the_reference(inputs, start, state, has_keys, dtype=None, has_bias=True):
    """Decode all tokens from `start` on with both, and compare outputs and states."""
    codebook = inputs.codebook
    # Keys of another codebook are kept: all states have them, and the copy below drops them.
    reference = DecodeState.of([state], [codebook + 1], dtype)
    reference, state = copy_of(reference, has_keys), copy_of(reference, has_keys)
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
        *((heads, True, has_keys) for heads in HEADS for has_keys in (True, False)),
        ("shga", False, True),
        ("gqa", False, False),
    ],
)
def test_decoding_equals_the_reference(heads, cache, has_keys):
    """Rows at different positions; enough tokens for the slots to wrap and tokens to be evicted."""
    h, g = HEADS[heads]
    n = 9 if heads == "shga" else 3
    sizes = {"h": h, "g": g, "d_v": 20, "block_len": L, "dtype": torch.float32}
    inputs = attention_inputs(4 + n, **sizes)
    _, state = vq_attention(*inputs.part(0, 4), inputs.empty_state(cache), reduction="serial")
    state = state.reset(torch.tensor([False, True]))
    equal_to_the_reference(inputs, 4, state, has_keys)


def test_positional_scores_are_optional():
    inputs = attention_inputs(6, d_v=20, block_len=L, dtype=torch.float32)
    equal_to_the_reference(inputs, 0, inputs.empty_state(), has_keys=False, has_bias=False)


def test_a_bfloat16_state_keeps_its_means_in_float32():
    inputs = attention_inputs(10, d_v=20, block_len=L, dtype=torch.float32)
    inputs = replace(inputs, v=inputs.v.bfloat16().float())
    equal_to_the_reference(inputs, 0, inputs.empty_state(), has_keys=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, True])
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
