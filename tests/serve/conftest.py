"""A server for all tests of a file, and short segments for the engine."""

import pytest
from servers import a_model, a_service, running

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
    return a_model().double()
