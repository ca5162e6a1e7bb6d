"""The inputs of the attention: one place where sequences are cut."""

import pytest
import torch
from helpers import attention_inputs
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.ops.inputs import AttentionInputs, segment_lens


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 250))
def test_segments_are_whole_blocks_except_the_last(seq_len, block_len, max_len):
    lens = segment_lens(seq_len, block_len, max_len)
    *first, last = lens
    assert sum(lens) == seq_len
    assert all(n % block_len == 0 for n in first)
    assert last % block_len == 0 or last < block_len
    assert max(lens) <= max(max_len, block_len)


@pytest.mark.parametrize(
    ("seq_len", "max_len", "lens"),
    [(8, 8, [8]), (3, 8, [3]), (11, 11, [8, 3]), (16, 8, [8, 8]), (21, 11, [8, 8, 4, 1])],
)
def test_segment_lens_of_known_sequences(seq_len, max_len, lens):
    assert segment_lens(seq_len, 4, max_len) == lens


def test_split_inputs_concatenate_to_the_original():
    tensors = attention_inputs(11, h=2, g=3).part(0, 11)
    inputs = AttentionInputs(*tensors)
    parts = inputs.split([8, 3])
    assert [part.seq_len for part in parts] == [8, 3]
    for name, dim in (("q", -2), ("k_hat", -2), ("z", -1), ("v", -2), ("by_distance", -2)):
        joined = torch.cat([getattr(part, name) for part in parts], dim)
        assert torch.equal(joined, getattr(inputs, name))
    assert all(part.codebook is inputs.codebook for part in parts)
    assert inputs.split([11])[0] is inputs


def test_blocked_inputs_divide_the_axis_of_tokens():
    inputs = AttentionInputs(*attention_inputs(8, h=2).part(0, 8))
    blocked = inputs.blocked(2)
    assert torch.equal(blocked.q.flatten(-3, -2), inputs.q)
    assert torch.equal(blocked.z.flatten(-2), inputs.z)
    assert blocked.by_distance.shape[-3:-1] == (2, 4)
