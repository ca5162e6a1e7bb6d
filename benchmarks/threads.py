"""How OpenMP threads wait: spinning, as `tvq` chooses, and one thread; idle and on shared cores.

    python benchmarks/threads.py --rounds 3

Prints the median seconds of `tvq sample books` and of 30 steps of `tvq train tiny`. The busy
processes multiply matrices on two threads each. Run it on a machine without other work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

SETTINGS = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")
POLICIES = {
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # libgomp's default; switches `share_cores` off
    "tvq": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
COMMANDS = {
    "sample": "sample books --seed 0 --tokens 300",
    "train": "train tiny --train.steps 30 --optim.warmup 5 --train.eval-every 1000 --out run",
}
BUSY = """
import torch
torch.set_num_threads(2)
x = torch.randn(1024, 1024)
while True:
    x = torch.tanh(x @ x)
"""


def seconds(command: str, policy: str) -> float:
    """Return the time that a command takes."""
    environment = {name: x for name, x in os.environ.items() if name not in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "transformer_vq", *command.split()],
            env=environment | POLICIES[policy],
            cwd=folder,
            capture_output=True,
            check=True,
        )
        return time.monotonic() - start


def main() -> None:
    """Measure everything in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements per median")
    rounds = range(parser.parse_args().rounds)
    print(f"| seconds | {' | '.join(POLICIES)} |\n| --- |{' ---: |' * len(POLICIES)}")
    for load in ("idle", "beside two busy processes"):
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2) if load != "idle"]
        try:
            for name, command in COMMANDS.items():
                found = [[seconds(command, policy) for policy in POLICIES] for _ in rounds]
                medians = [f"{statistics.median(x):.1f}" for x in zip(*found, strict=True)]
                print(f"| {name}, {load} | {' | '.join(medians)} |", flush=True)
        finally:
            for process in busy:
                process.kill()


if __name__ == "__main__":
    main()
