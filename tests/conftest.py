"""Settings for all tests."""

import pytest
import torch
from hypothesis import settings

# Examples are the same on every run: a red test stays red until the code changes.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    # Also fills uninitialised memory with NaN, so that reading it cannot go unseen.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
