"""The mode a model is in while it is measured or writes."""

import pytest
import torch
from torch import nn

from transformer_vq.nn.device import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_mode_as_it_was_whatever_happens(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training)

    def use() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(2)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert all(module.training == training for module in model.modules())
    assert torch.is_grad_enabled()
