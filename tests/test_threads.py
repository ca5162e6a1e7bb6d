"""How OpenMP threads wait while other processes use the cores."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from transformer_vq.threads import IdleTeam, share_cores

TWO_CORES = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
BUSY = TWO_CORES + "while True: pass"
# Prints whether the team that keeps the threads from spinning exists.
WATCH = f"""{TWO_CORES}
import threading, time
import torch
from transformer_vq.threads import share_cores
torch.set_num_threads(2)
share_cores()
while True:
    print(int(any(x.name == "idle-team" for x in threading.enumerate())), flush=True)
    time.sleep(0.1)
"""


def n_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_idle_team_exists_until_it_ends():
    torch.zeros(2**20).add_(1)
    before = n_threads()
    team = IdleTeam()
    assert n_threads() >= before + 2  # the thread that holds the team, and another member
    team.end()
    deadline = time.monotonic() + 10
    while n_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert n_threads() == before


@pytest.mark.slow
def test_share_cores_stops_spinning_beside_other_processes(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    watched = subprocess.Popen([sys.executable, "-c", WATCH], stdout=subprocess.PIPE, text=True)
    try:
        assert watched.stdout is not None
        assert any(line == "1\n" for line, _ in zip(watched.stdout, range(600), strict=False))
    finally:
        for process in (watched, *busy):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
@pytest.mark.usefixtures("_two_threads")
def test_share_cores_respects_the_environment(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    before = n_threads()
    share_cores()
    assert n_threads() == before
