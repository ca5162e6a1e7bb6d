"""Model states: tensors by name, and back."""

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.nn.model import ModelState


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_a_state_round_trips_through_named_tensors(attention, compressive_cache):
    config = tiny_config(
        attention=attention, compressive_cache=compressive_cache, p_dropsin=0.2, p_droplyr=0.2
    )
    model = TransformerVQ(config)
    tokens = torch.randint(17, (2, 11))
    ids = torch.arange(11).expand(2, -1) // 6
    state = model(tokens, document_ids=ids).state.detach()
    tensors = state.to_tensors("a")
    again = ModelState.from_tensors(tensors | {"b/other": tokens}, "a")
    back = again.to_tensors("a")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    model.eval()
    more = {"document_ids": ids[:, -1:].expand(2, 11)}
    assert torch.equal(model(tokens, state, **more).logits, model(tokens, again, **more).logits)
