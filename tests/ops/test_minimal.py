"""The one-page form of Theorem 3.7 equals Definition 3.1 and every other form."""

from itertools import pairwise

import pytest
import torch
from helpers import (
    assert_close,
    assert_same_gradients,
    attention_inputs,
    decode_all,
    reference,
)

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.minimal import minimal_vq_attention

HEADS = {"shga": (1, 1), "mqa": (1, 3), "mha": (3, 1), "gqa": (2, 3)}


def assert_same_state(got, want):
    for name in ("k", "v", "z", "position"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.cache.count, want.cache.count)
    in_use = (want.cache.count > 0).unsqueeze(-1)
    assert_close("means", got.cache.mean * in_use, want.cache.mean * in_use)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seq_len", [1, 7, 8, 24, 37])
def test_minimal_equals_definition_3_1_with_gradients(heads, seq_len):
    h, g = HEADS[heads]
    inputs = attention_inputs(seq_len, h=h, g=g, block_len=8, requires_grad=True)
    got, _ = minimal_vq_attention(*inputs.part(0, seq_len), inputs.empty_state())
    want = reference(inputs)
    assert_close("output", got, want)
    assert_same_gradients(inputs.leaves(), got, want)


@pytest.mark.parametrize("reduction", ["auto", "serial", "matmul", "associative", "input_scan"])
@pytest.mark.parametrize("cuts", [(), (3,), (8, 16), (1, 9, 30)])
def test_minimal_equals_every_reduction_with_a_carried_state(reduction, cuts):
    inputs = attention_inputs(40, h=2, g=2, block_len=8)
    got_state = want_state = inputs.empty_state()
    for start, stop in pairwise([0, *cuts, 40]):
        part = inputs.part(start, stop)
        got, got_state = minimal_vq_attention(*part, got_state)
        want, want_state = vq_attention(*part, want_state, reduction=reduction)
        assert_close("output", got, want)
        assert_same_state(got_state, want_state)


def test_minimal_equals_decoding_token_by_token():
    inputs = attention_inputs(30, h=2, g=2, block_len=8)
    want, want_state = minimal_vq_attention(*inputs.part(0, 30), inputs.empty_state())
    got, got_state = decode_all(inputs, 0, 30, inputs.empty_state())
    assert_close("output", got, want)
    assert_same_state(got_state, want_state)
