"""The Triton attention equals the plain one, forward and backward, in the interpreter.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    assert_close,
    assert_equal_to_serial,
    assert_same_gradients,
    attention_inputs,
    run_split,
)
from interpreter import detectors

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.triton import attention, launch

HEADS = {"shga": (1, 1), "mqa": (1, 2), "mha": (2, 1), "gqa": (2, 2)}
L = 18  # two tiles of 16 with an overhang


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    """Check every launch; large tiles are as many programs as small ones, but slower."""
    small = {
        name: tuple(replace(x, rows=16, columns=32, values=16) for x in tiles)
        for name, tiles in launch.TILES.items()
    }
    monkeypatch.setattr(launch, "TILES", small)
    with detectors():
        yield


equal = partial(assert_equal_to_serial, backend="triton")


def inputs_of(seq_len, heads="shga", *, b=1, d_v=6, d_k=5, seed=0):
    h, g = HEADS[heads]
    sizes = {"b": b, "h": h, "g": g, "d_k": d_k, "d_v": d_v, "n_code": 7, "block_len": L}
    return attention_inputs(seq_len, dtype=torch.float32, requires_grad=True, seed=seed, **sizes)


@pytest.mark.parametrize("heads", HEADS)
def test_weights_and_products_equal_plain_attention(heads):
    equal(inputs_of(2 * L + 1, heads))


@pytest.mark.parametrize("heads", ["mqa", "gqa"])
def test_one_kernel_equals_plain_attention_for_narrow_values(monkeypatch, heads):
    def fail(*_):
        raise AssertionError("the weights are in memory")

    monkeypatch.setattr(attention, "_weighted_values", fail)
    equal(inputs_of(2 * L + 1, heads, d_v=5))


@pytest.mark.parametrize("d_v", [5, 6])
@pytest.mark.parametrize("seq_len", [1, L - 1, L])
def test_short_sequences(seq_len, d_v):
    equal(inputs_of(seq_len, d_v=d_v))


@pytest.mark.parametrize("options", [{}, {"cache": False}, {"grad_through_cache": False}])
@pytest.mark.parametrize("d_v", [5, 6])
def test_a_carried_state_keeps_results_and_gradients(options, d_v):
    equal(inputs_of(3 * L + 3, d_v=d_v), (L + 1,), **options)


@pytest.mark.parametrize(
    ("ragged", "d_v"), [("documents", 5), ("documents", 6), ("padding", 6), ("both", 5)]
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
    inputs = inputs_of(2 * L + 9, "mha", b=2)
    empty = inputs.empty_state()
    _, seen = vq_attention(*inputs.part(0, 2 * L + 3), empty, reduction="serial")
    part = inputs.part(2 * L + 3, 2 * L + 9)
    for state in (
        replace(empty, cache=seen.cache),
        replace(seen, position=empty.position),
        seen.reset(torch.tensor([True, False])),
    ):
        want, after = vq_attention(*part, state, reduction="serial")
        got, got_after = vq_attention(*part, state, backend="triton")
        assert_close("output", got, want)
        assert torch.equal(got_after.cache.count, after.cache.count)


@pytest.mark.parametrize("d_v", [16, 24])
def test_bfloat16_is_close_to_float32(d_v):
    low = attention_inputs(
        L + 3, b=1, block_len=L, d_k=16, d_v=d_v, dtype=torch.bfloat16, requires_grad=True
    )
    high = attention_inputs(L + 3, b=1, block_len=L, d_k=16, d_v=d_v, dtype=torch.float32)
    for a, b in zip(high.leaves().values(), low.leaves().values(), strict=True):
        a.data.copy_(b)
        a.requires_grad_()
    high.codebook = low.codebook.float()
    got, _ = run_split(low, backend="triton")
    want, _ = run_split(high, reduction="serial")
    assert_close("output", got.float(), want, 2e-2)
    probe = torch.randn_like(want)
    grads = torch.autograd.grad((got * probe).sum(), list(low.leaves().values()))
    wanted = torch.autograd.grad((want * probe).sum(), list(high.leaves().values()))
    for name, a, b in zip(low.leaves(), grads, wanted, strict=True):
        assert_close(f"gradient of {name}", a.float(), b, 2e-2)
