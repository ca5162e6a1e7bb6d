"""`accelerate launch`: two processes give the weights and codebooks of one, without a callback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close

SCRIPT = Path(__file__).parent / "accelerated_training.py"
# `--cpu` would start a single process; with this option and variable, it is two on the CPU.
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
SETTINGS = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


def run(command: list[str], kind: str, batch_size: int, folder: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *command, str(SCRIPT), kind, str(batch_size), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "codebooks" not in done.stderr


@pytest.mark.parametrize("kind", ["trainer", "fsdp"])
def test_two_processes_train_the_model_of_one(kind, tmp_path):
    run([], kind, 4, tmp_path)
    run([*LAUNCH, *SETTINGS, "--main_process_port=0"], kind, 2, tmp_path)
    single = torch.load(tmp_path / f"{kind}-0-of-1.pt")
    ranks = [torch.load(tmp_path / f"{kind}-{rank}-of-2.pt") for rank in range(2)]
    for name, want in single.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert_close(name, ranks[0][name].double(), want.double(), tolerance=1e-5)
