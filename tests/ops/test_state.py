"""Operations on states; test_blockwise covers selecting and resetting rows."""

import torch
from helpers import attention_inputs

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.state import FullState, VQState


def test_bytes_are_those_of_all_tensors():
    state = VQState.empty(2, 3, 4, 5, 6, 7, dtype=torch.float32)
    window = 2 * 3 * 4 * (5 + 6) * 4 + 2 * 3 * 4 * 8
    assert state.n_bytes == window + 2 * 8 + 2 * 3 * 7 * (6 * 4 + 8)


def test_all_tensors_of_a_state_move_to_a_device():
    inputs = attention_inputs(9)
    _, state = vq_attention(*inputs.part(0, 9), inputs.empty_state())
    moved = state.to("meta")
    assert moved.v.is_meta
    assert moved.cache.mean.is_meta
    assert moved.n_bytes == state.n_bytes


def test_slots_fill_from_the_newest_end():
    state = FullState(torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2), torch.tensor([0, 3, 9]))
    want = [[False] * 4, [False, True, True, True], [True] * 4]
    assert state.window_valid.tolist() == want
