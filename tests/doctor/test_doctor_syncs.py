"""Host syncs: counted by the line of this package that causes them.

The tests raise the warnings themselves that PyTorch raises on a GPU.
"""

import warnings

import pytest
import torch

from transformer_vq.doctor import syncs
from transformer_vq.doctor.samples import Sizes

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("gqa",))
CUDA = torch.device("cuda")


@pytest.fixture
def modes(monkeypatch):
    """Return the modes that were set."""
    found = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def sync(file, line):
    """Warn as PyTorch does, from a line of a file of the package."""
    code = "\n" * (line - 1) + "warnings.warn('called a synchronizing CUDA operation')"
    exec(compile(code, str(syncs.PACKAGE / file), "exec"), {"warnings": warnings})


def test_syncs_are_counted_by_line(modes):
    with syncs.counting() as found:
        for _ in range(3):
            sync("nn/stack.py", 7)
        sync("training/step.py", 9)
        warnings.warn("something else", stacklevel=1)
    assert found == {"transformer_vq/nn/stack.py:7": 3, "transformer_vq/training/step.py:9": 1}
    assert modes == ["warn", 0]


def test_mode_is_restored_after_an_error(modes):
    with pytest.raises(RuntimeError), syncs.counting():
        raise RuntimeError
    assert modes == ["warn", 0]


def test_first_call_is_a_warm_up(modes):
    calls = []

    def work():
        calls.append(1)
        sync("nn/stack.py", 7)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warm-up is outside of the count
        found = syncs._count("work", lambda: work, CUDA)
    assert len(calls) == 2
    assert (found.count, found.failed) == (1, False)


def test_crash_is_a_finding(modes):
    def crash():
        raise RuntimeError("no kernel image is available")

    found = syncs._count("work", lambda: crash, CUDA)
    assert found.failed
    assert "no kernel image" in found.note


def test_cpu_is_skipped():
    found = [task() for task in syncs.count_syncs(SMALL, torch.device("cpu"))]
    assert [x.what for x in found] == ["one training step", "decoding 8 tokens"]
    assert all(x.count is None and "needs CUDA" in x.note and not x.failed for x in found)


def test_the_work_that_is_counted_runs():
    cpu = torch.device("cpu")
    assert syncs.training_step(SMALL, cpu)().tokens == 32
    syncs.decoding(SMALL, cpu)()
