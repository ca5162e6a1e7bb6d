"""The files in examples/launchers/ start `tvq train`, and resume a run that exists.

Slurm, Kubernetes and SkyPilot are replaced by stubs that print their command lines. The commands of
torchrun are parsed by torch, those of tvq by tvq.
"""

import json
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest
from test_commands import parse
from torch.distributed.run import get_args_parser

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
LAUNCHERS = ROOT / "examples" / "launchers"
SLURM = (LAUNCHERS / "slurm.sh").read_text()
SKYPILOT = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
SERVICE, JOB = yaml.safe_load_all((LAUNCHERS / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
STUBS = {
    "scontrol": '[ "$1" != show ] || { echo node-a; echo node-b; }',
    "srun": 'while [ "$1" != torchrun ]; do shift; done; "$@"',
    "torchrun": 'exit "$STATUS_OF_TORCHRUN"',
}
RECORD = """#!/bin/bash
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$(basename "$0")" "$@" >> "$LOG"
"""


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs a script and returns (command, arguments) of all stubs."""
    commands, log = tmp_path / "commands", tmp_path / "log"
    commands.mkdir()
    for name, body in STUBS.items():
        (commands / name).write_text(RECORD + body)
        (commands / name).chmod(stat.S_IRWXU)

    def launch(script, *shell, status=0, **environment):
        log.write_text("")
        environment |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "LOG": str(log),
            "STATUS_OF_TORCHRUN": str(status),
            "DATA": "PG 19",
            "RUN": str(tmp_path / "run"),
        }
        process = subprocess.run(
            ["bash", *shell, script], env=environment, capture_output=True, text=True, timeout=60
        )
        assert process.returncode == status, process.stderr
        assert process.stderr == ""
        return [(name, words) for name, *words in map(json.loads, log.read_text().splitlines())]

    return launch


def launch_slurm(launch, seconds_left=3600, status=0):
    return launch(
        str(LAUNCHERS / "slurm.sh"),
        status=status,
        SLURM_JOB_NODELIST="node-[a-b]",
        SLURM_NNODES="2",
        SLURM_CPUS_PER_TASK="64",
        SLURM_JOB_ID="7",
        SLURM_JOB_END_TIME=str(int(time.time()) + seconds_left),
    )


def launch_kubernetes(launch, rank=0):
    (container,) = POD["containers"]
    flags = container["command"][1:]
    return launch(*container["args"], *flags, JOB_COMPLETION_INDEX=str(rank))


def launch_skypilot(launch, rank=0):
    return launch(
        SKYPILOT["run"],
        "-c",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
    )


def torchrun(calls):
    """Return the parsed options of the only torchrun."""
    (words,) = (words for name, words in calls if name == "torchrun")
    return get_args_parser().parse_args(words)


@pytest.mark.parametrize("start", [launch_slurm, launch_kubernetes, launch_skypilot])
def test_first_start_trains_and_the_next_resumes(start, launch, tmp_path, capsys):
    run = tmp_path / "run"
    options = torchrun(start(launch))
    assert options.training_script == "transformer_vq"
    assert options.module
    assert options.rdzv_backend == "c10d"
    assert (options.nproc_per_node, options.shutdown_timeout) == ("8", 110)
    command, preset, *words = options.training_script_args
    assert (command, preset) == ("train", "pg19-1.3b")
    assert words == ["--data.path", "PG 19", "--out", str(run), "--parallel.fsdp", "8"]
    parse(["tvq", command, preset, *words], capsys)
    run.mkdir()
    (run / "config.json").touch()
    assert torchrun(start(launch)).training_script_args == ["resume", str(run)]


def test_slurm_requeues_only_what_the_time_limit_stopped(launch):
    signals = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", SLURM, flags=re.MULTILINE)
    (seconds,) = map(int, signals)
    assert "\n#SBATCH --requeue\n" in SLURM
    calls = launch_slurm(launch)
    assert [name for name, _ in calls] == ["scontrol", "srun", "torchrun"]
    assert calls[1][1][:3] == ["--kill-on-bad-exit=0", "--cpus-per-task", "64"]
    options = torchrun(calls)
    assert (options.nnodes, options.rdzv_id, options.rdzv_endpoint) == ("2", "7", "node-a:29500")
    assert options.shutdown_timeout < seconds - 30  # leaves time to requeue
    requeue = ("scontrol", ["requeue", "7"])
    # Slurm may send the signal a minute early.
    for seconds_left in (seconds + 60, seconds - options.shutdown_timeout):
        assert launch_slurm(launch, seconds_left, status=1)[-1] == requeue
    assert requeue not in launch_slurm(launch, seconds_left=seconds + 120, status=1)  # failed
    assert requeue not in launch_slurm(launch, seconds_left=10)  # finished


def test_kubernetes_gives_pods_names_time_and_a_shared_folder(launch):
    names = {x["metadata"]["name"] for x in (SERVICE, JOB)}
    names |= {POD["subdomain"], SERVICE["spec"]["selector"]["job-name"]}
    assert names == {"tvq"}
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert (JOB["apiVersion"], JOB["spec"]["completionMode"]) == ("batch/v1", "Indexed")
    first, second = (torchrun(launch_kubernetes(launch, rank)) for rank in (0, 1))
    assert first.rdzv_endpoint == second.rdzv_endpoint == "tvq-0.tvq:29500"
    assert first.rdzv_conf.split(",")[0] == "is_host=1"
    assert second.rdzv_conf.split(",")[0] == "is_host=0"
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(first.nnodes)
    assert first.max_restarts == 0  # the Job replaces all pods
    assert POD["terminationGracePeriodSeconds"] > first.shutdown_timeout
    (container,) = POD["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(first.nproc_per_node)
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
    assert all(variable["value"].startswith("/shared/") for variable in container["env"])


def test_skypilot_uses_the_addresses_of_its_nodes(launch):
    first, second = (torchrun(launch_skypilot(launch, rank)) for rank in (0, 1))
    assert SKYPILOT["num_nodes"] > 1
    assert first.nnodes == "2"
    assert first.rdzv_endpoint == second.rdzv_endpoint == "10.0.0.1:29500"
    assert (first.rdzv_conf, second.rdzv_conf) == ("is_host=1", "is_host=0")
    assert (first.local_addr, second.local_addr) == ("10.0.0.1", "10.0.0.2")
    (folder,) = SKYPILOT["volumes"]
    assert all(value.startswith(f"{folder}/") for value in SKYPILOT["envs"].values())
