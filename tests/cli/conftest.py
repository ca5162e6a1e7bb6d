"""A sandbox that all tests of commands share."""

import pytest
from cli_sandbox import Sandbox


@pytest.fixture(scope="session")
def shared_sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("commands") / "sandbox")


@pytest.fixture
def sandbox(shared_sandbox):
    yield shared_sandbox
    shared_sandbox.restore()
