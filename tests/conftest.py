"""Settings for all tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores, so each one computes on a single thread. Set before torch is
    # imported, and in the environment, which subprocesses inherit.
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests share the cores with each other
# Some virtual machines report AMX but kill a process that uses it (SIGILL in bf16 products).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

from transformer_vq.progress import TerminalReporter, reporting

MAX_WORKERS = 8  # each one needs about 1 GB

# Files whose tests start several processes: one worker runs all of them, one after the other.
SEVERAL_PROCESSES = {
    *("test_accelerate.py", "test_elastic.py", "test_worlds.py"),
}
# Files whose tests share something expensive, so that one worker runs all tests of the file.
SHARED_SETUP = {
    *("test_compile.py", "test_hf_export.py", "test_hf_export_options.py"),
    *("test_lm_eval.py", "test_stability.py"),
    *("test_cli_fuzz.py", "test_cli_errors.py", "test_mutations.py", "test_signals.py"),
}

# Examples are the same on every run: a red test stays red until the code changes.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Use one worker more than this process may use cores: many tests wait for subprocesses."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return min(1 + (len(affinity(0)) if affinity else os.cpu_count() or 1), MAX_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a free worker the next test, or the next group; the largest groups come first."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        # By file, not by the mark `xdist_group`, which has no effect with pytest 9.2.
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0].rpartition("/")[2]
            if file in SEVERAL_PROCESSES:
                return "several processes"
            return file if file in SHARED_SETUP else nodeid

    return GroupScheduling(config, log)


@pytest.fixture(autouse=True)
def _reporter():
    """Print progress and warnings to stderr, as the command does."""
    with reporting(TerminalReporter()):
        yield


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    # Also fills uninitialised memory with NaN, so that reading it cannot go unseen.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
