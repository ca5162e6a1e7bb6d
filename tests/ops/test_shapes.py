"""Wrong shapes are rejected where they enter, with both shapes in the message."""

import pytest
from helpers import attention_inputs

from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.encoder import encoder_attention
from transformer_vq.ops.quadratic import quadratic_attention


@pytest.mark.parametrize("wrong", ["k_hat", "z", "v", "by_distance"])
def test_attention_rejects_arguments_of_another_length(wrong):
    inputs = attention_inputs(9)
    value = getattr(inputs, wrong)
    setattr(inputs, wrong, value[..., :-1] if wrong == "z" else value[..., :-1, :])
    with pytest.raises(ValueError, match=f"{wrong} has shape"):
        vq_attention(
            inputs.q,
            inputs.k_hat,
            inputs.z,
            inputs.v,
            inputs.codebook,
            inputs.by_distance,
            inputs.empty_state(),
        )


def test_attention_rejects_states_and_biases_of_another_shape():
    inputs = attention_inputs(9)
    with pytest.raises(ValueError, match="state_keys has shape"):
        vq_attention(*inputs.part(0, 9), attention_inputs(9, b=3).empty_state())
    with pytest.raises(ValueError, match="by_distance has 5 distances, want 6"):
        vq_attention(*inputs.part(0, 9), attention_inputs(9, block_len=5).empty_state())


def test_the_other_ops_reject_wrong_shapes():
    inputs = attention_inputs(9)
    with pytest.raises(ValueError, match="z has shape"):
        encoder_attention(inputs.q, inputs.z[0], inputs.v, inputs.codebook)
    with pytest.raises(ValueError, match="v has shape"):
        quadratic_attention(inputs.q, inputs.k_hat, inputs.v[:, :, 1:])
