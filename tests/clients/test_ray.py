"""Ray Train: its workers train the run that torchrun trains, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import losses, tiny_run

from transformer_vq.config_files import config_text
from transformer_vq.training.run import read_history

pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[2] / "examples" / "launchers" / "ray_train.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def test_ray_workers_train_as_torchrun_does(tmp_path):
    config = tiny_run(tmp_path, model={"p_droplyr": 0.3})
    (tmp_path / "my.toml").write_text(config_text(config))
    output = run(tmp_path, str(EXAMPLE), "my.toml", "ray")
    assert f"step {config.train.steps}: " in output
    assert [row["event"] for row in read_history(tmp_path / "ray")] == ["start", "finish"]
    command = ["-m", "transformer_vq", "train", "--config", "my.toml", "--out", "torchrun"]
    run(tmp_path, *TORCHRUN, *command)
    assert losses(tmp_path / "ray") == losses(tmp_path / "torchrun")
    assert len(losses(tmp_path / "ray")) > config.train.steps
