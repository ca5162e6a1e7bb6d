"""Commands under torchrun: killed workers, signals, invalid options, shared evaluation."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from checks import tiny
from helpers import losses

from transformer_vq.config import ParallelConfig
from transformer_vq.training.checkpoint import checkpoint_steps
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import train

SECONDS = 120
LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]


def options_of(run, config):
    """Return the arguments of `tvq train` for a config."""
    file = run.with_suffix(".json")
    file.write_text(json.dumps(config.to_dict()))
    return ["-m", "transformer_vq", "train", "--config", str(file), "--out", str(run), "--json"]


def torchrun(run, config, *options):
    """Start `torchrun ... tvq train` for a config."""
    return start([*LAUNCHER, *options, *options_of(run, config)])


def start(arguments, **environment):
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Return stdout and stderr of a process; kill its process group in the end."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return out, err


def workers(process):
    """Return the process ids of the workers of a torchrun in the order of their start."""
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    return sorted(int(pid) for pid in listing.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, ParallelConfig(fsdp=2)], ids=["dp", "fsdp, async save"])
def test_killed_worker_is_restarted_and_the_losses_are_unchanged(tmp_path, mesh):
    options = {"steps": 40, "save_every": 5, "eval_every": 20, "async_save": mesh is not None}
    config = tiny(tmp_path, mesh, train=options)
    process = torchrun(tmp_path / "run", config, "--nproc-per-node=2", "--max-restarts=1")
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if len(read_metrics(tmp_path / "run")) >= 12:
                os.kill(workers(process)[-1], signal.SIGKILL)
                break
            time.sleep(0.02)
        else:
            pytest.fail("the run did not reach step 12 in time")
    finally:
        out, err = finish(process)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["finished"]
    assert "exitcode: -9" in err, err
    uninterrupted = torchrun(tmp_path / "uninterrupted", config, "--nproc-per-node=2")
    _, err = finish(uninterrupted)
    assert uninterrupted.returncode == 0, err
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")
    assert len(out.splitlines()) == 3  # only rank 0 prints


@pytest.mark.slow
def test_a_kill_during_an_asynchronous_save_loses_only_that_checkpoint(tmp_path):
    options = {"steps": 12, "save_every": 4, "eval_every": 12}
    config = tiny(tmp_path, ParallelConfig(fsdp=2), train=options | {"async_save": True})
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "run"
    out, err = finish(torchrun(uninterrupted, config, "--nproc-per-node=2"))
    assert out, err
    # Both ranks are killed when they begin to write step 8.
    program = (
        "import os, signal, sys, threading, time\n"
        "from transformer_vq.parallel import storage\n"
        "write = storage.write_safetensors\n"
        "def slow(path, *args):\n"
        "    if 'step-00000008' in str(path):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(path, *args)\n"
        "storage.write_safetensors = slow\n"
        "from transformer_vq.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    script = tmp_path / "killed.py"
    script.write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    process = start([*launcher, *options_of(run, config)[2:]])
    finish(process)
    assert process.returncode != 0
    assert checkpoint_steps(run) == [4]
    assert any((run / "checkpoints").glob(".step-00000008*.partial"))
    again = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = start([*again, "-m", "transformer_vq", "resume", str(run)])
    _, err = finish(process)
    assert process.returncode == 0, err
    assert losses(run) == losses(uninterrupted)
    assert not list(run.rglob("*.partial"))


@pytest.mark.slow
def test_signal_to_one_rank_stops_all_with_the_same_status(tmp_path):
    config = tiny(tmp_path, train={"steps": 4000, "save_every": 5000, "eval_every": 5000})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        start(
            options_of(tmp_path / "run", config),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + SECONDS
        while len(read_metrics(tmp_path / "run")) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        ranks[1].send_signal(signal.SIGTERM)
    finally:
        (out, err), (other, _) = (finish(process) for process in ranks)
    assert [process.returncode for process in ranks] == [128 + signal.SIGTERM] * 2, err
    summary = json.loads(out.splitlines()[-1])
    assert not summary["finished"]
    assert summary["step"] >= 3
    assert "tvq resume" in out
    assert other == ""


@pytest.mark.slow
def test_usage_error_is_printed_once(tmp_path):
    process = torchrun(
        tmp_path / "run", tiny(tmp_path, train={"batch_size": 3}), "--nproc-per-node=2"
    )
    _, err = finish(process)
    assert process.returncode != 0
    errors = [line for line in err.splitlines() if "tvq: " in line]
    assert len(errors) == 1, err
    assert "use a multiple of 2" in errors[0]


@pytest.mark.slow
def test_evaluation_by_two_processes_is_printed_once(tmp_path):
    config = tiny(tmp_path, train={"steps": 2})
    run = tmp_path / "run"
    train(config, run)
    want = evaluate(run).to_dict()
    command = ["-m", "transformer_vq", "eval", str(run), "--device", "cpu", "--json"]
    process = start([*LAUNCHER, "--nproc-per-node=2", *command])
    out, err = finish(process)
    assert process.returncode == 0, err
    *lines, record = out.splitlines()
    assert len(lines) == 2  # only rank 0 prints, a line per protocol
    assert json.loads(record) == json.loads((run / "evaluation-test.json").read_text())
    for protocol, result in json.loads(record)["protocols"].items():
        single = want["protocols"][protocol]
        assert result["bits_per_byte"] == pytest.approx(single["bits_per_byte"], rel=1e-6)
        assert result["tokens"] == single["tokens"]
