"""Keep OpenMP threads from spinning on cores that other processes need.

Between two parallel operations the threads of libgomp, PyTorch's OpenMP library, spin for several
milliseconds before they sleep. On idle cores this is fast: waking a thread takes longer than most
operations of a small model. On shared cores it is a waste: a thread that spins uses up its share of
a core, and is preempted when there is work again.

The policy can be set only when libgomp is loaded (`OMP_WAIT_POLICY`), but libgomp itself stops
spinning while a process has more OpenMP threads than cores (see GOMP_SPINCOUNT in its manual). So
`share_cores` keeps a second, sleeping team of threads for as long as other processes use the cores.
The number of threads of an operation does not change, and neither does any result.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

STATISTICS = Path("/proc/stat")  # Linux only, as is libgomp in the packages of PyTorch
PERIOD = 0.5  # seconds between two looks at the load
MARGIN = 0.3  # cores that others may use before threads stop spinning
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # the user's own choice has priority


def share_cores() -> None:
    """Adapt how OpenMP threads wait to the load of the machine, until the process ends.

    Does nothing with a single thread, on other systems, or if the environment has a wait policy.
    """
    is_chosen = any(name in os.environ for name in SETTINGS)
    if not is_chosen and torch.get_num_threads() > 1 and STATISTICS.exists():
        threading.Thread(target=_adapt, name="share-cores", daemon=True).start()


def _adapt() -> None:
    cores = os.sched_getaffinity(0)
    idle_team: IdleTeam | None = None
    before = _used(cores)
    while True:
        time.sleep(PERIOD)
        now = _used(cores)
        seconds, by_all, by_this_process = (x - y for x, y in zip(now, before, strict=True))
        before = now
        others = (by_all - by_this_process) / seconds
        if others + torch.get_num_threads() <= len(cores) + MARGIN:
            if idle_team is not None:
                idle_team.end()
            idle_team = None
        elif idle_team is None:
            idle_team = IdleTeam()


def _used(cores: set[int]) -> tuple[float, float, float]:
    """Return a time, and CPU seconds until then: of all processes on `cores`, and of this one."""
    names = {f"cpu{i}" for i in cores}
    rows = map(str.split, STATISTICS.read_text().splitlines())
    # The first columns: user, nice and system.
    ticks = sum(int(n) for name, *fields in rows if name in names for n in fields[:3])
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


class IdleTeam:
    """A team of OpenMP threads that exists and sleeps until `end`."""

    def __init__(self) -> None:
        self._ended, started = threading.Event(), threading.Event()

        def hold() -> None:
            torch.zeros(2**20).add_(1)  # large enough for all threads: libgomp creates a team
            started.set()
            self._ended.wait()  # libgomp frees the team when this thread ends

        self._thread = threading.Thread(target=hold, name="idle-team", daemon=True)
        self._thread.start()
        started.wait()

    def end(self) -> None:
        """Free the threads."""
        self._ended.set()
        self._thread.join()
