"""A server for all tests of a file, and short segments for the engine."""

import pytest
import torch
from servers import a_service, running

from transformer_vq import ModelConfig, TransformerVQ
from transformer_vq.generation import prefill as prefill_module


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return a_service(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def client(service):
    with running(service) as client:
        yield client


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(prefill_module, "SEGMENT_LEN", 16)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=257, d_model=16, n_layer=1, d_k=8, n_code=6, block_len=4)
    return TransformerVQ(config).double().eval()
