"""Weights that are drawn layer by layer, for models that do not fit into memory."""

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.nn.model import initial_weights


@pytest.mark.parametrize(
    "changes",
    [
        {"absolute_positions": True},
        {"head_type": "gqa", "tie_embeddings": True},
        {"attention": "full", "head_type": "mha"},
    ],
)
def test_initial_weights_are_those_of_a_new_model(changes):
    config = tiny_config(**changes)
    torch.manual_seed(5)
    want, after = TransformerVQ(config).state_dict(), torch.rand(1)
    torch.manual_seed(5)
    got = dict(initial_weights(config))
    assert got.keys() == want.keys()
    assert all(got[name].equal(x) for name, x in want.items())
    assert torch.rand(1).equal(after)
