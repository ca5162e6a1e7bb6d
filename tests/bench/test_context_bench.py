"""`tvq bench context`: limits, failures and the record; no process trains here."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from transformer_vq.bench import context
from transformer_vq.bench.cells import over_time
from transformer_vq.bench.context import run_processes
from transformer_vq.cli.main import main


def hang_on_rank_1(rank: int, n: int, folder: str) -> None:
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


def end(rank: int, n: int, folder: str) -> None:
    pass


def die(rank: int, n: int, folder: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_(rank: int, n: int, folder: str) -> None:
    raise RuntimeError("a bug")


def test_run_processes_returns_none_if_all_processes_end(tmp_path):
    assert run_processes(end, 2, str(tmp_path), 600) is None


def test_run_processes_kills_processes_above_the_time_limit(tmp_path, monkeypatch):
    started = tmp_path / "1.pid"
    monkeypatch.setattr(context, "SECONDS_BETWEEN_CHECKS", 0.05)
    # The deadline has passed as soon as the hanging process has started.
    monkeypatch.setattr(context.time, "monotonic", lambda: 1e9 if started.exists() else 0.0)
    assert run_processes(hang_on_rank_1, 2, str(tmp_path), 600) == over_time(600)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_run_processes_reports_a_killed_process_as_out_of_memory(tmp_path):
    assert run_processes(die, 1, str(tmp_path), 600) == "out of memory"


def test_run_processes_raises_the_bug_of_a_process(tmp_path):
    with pytest.raises(Exception, match="a bug"):
        run_processes(break_, 1, str(tmp_path), 600)


def fake_run_processes(rows, failed):
    """Return a `run_processes` that writes the given rows, by (processes, rank, length)."""

    def run(work, n, folder, time_limit):
        for (n_processes, rank, seq_len), row in rows.items():
            if n_processes == n:
                path = context._path(folder, n, rank, seq_len)
                path.write_text(json.dumps({"processes": n, "seq_len": seq_len} | row))
        return failed

    return run


def test_lengths_measured_before_the_time_limit_are_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(context, "N_PROCESSES", 2)
    monkeypatch.setattr(context, "LENGTHS", (8, 16, 32))
    rows = {
        (1, 0, 8): {"loss": 2.0, "bytes_per_layer": 0},
        (2, 0, 8): {"loss": 2.0, "bytes_per_layer": 5},
        (2, 1, 8): {"loss": 2.0, "bytes_per_layer": 7},
        (2, 0, 16): {"loss": 2.0, "bytes_per_layer": 5},  # rank 1 did not finish
        (2, 1, 32): {"loss": None, "bytes_per_layer": None, "failed": "out of memory"},
    }
    monkeypatch.setattr(context, "run_processes", fake_run_processes(rows, over_time(3)))
    out = tmp_path / "context.json"
    main(["bench", "context", "--time-limit", "3", "--out", str(out)])
    late, memory = over_time(3), "out of memory"
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 1 | 8 | 2.0000 |  |",
        f"| 1 | 16 | {late} |  |",
        f"| 1 | 32 | {late} |  |",
        "| 2 | 8 | 2.0000 | 7 |",
        f"| 2 | 16 | {late} |  |",
        f"| 2 | 32 | {memory} |  |",
    ]
    found = json.loads(out.read_text())["rows"]
    assert [row.get("failed") for row in found] == [None, late, late, None, late, memory]


def test_command_rejects_a_time_limit_of_zero(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "context", "--time-limit", "0"])
    assert stopped.value.code == 2
    assert "--time-limit 0" in capsys.readouterr().err
