"""The report: complete, in JSON, and without places of this machine."""

import getpass
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from transformer_vq.doctor import report
from transformer_vq.doctor.environment import environment
from transformer_vq.doctor.examine import Diagnosis
from transformer_vq.doctor.findings import MAX_NOTE, Check, Repeat, Syncs, without_places
from transformer_vq.doctor.speed import Speed

FINE = Check("auto", "fp32", "ok", 2e-7, 1e-5, 80, "worst: mqa, output")
BROKEN = Check("matmul", "bf16", "FAILED", 0.5, 2e-2, 80, "3 of 80, worst: mqa, output")


def diagnosis(**changes):
    fields = {
        "environment": environment(torch.device("cpu")),
        "checks": (FINE, Check("triton", "all", "skipped", note="needs a GPU")),
        "repeats": (Repeat("decoder", "equal"),),
        "syncs": (Syncs("one training step", 3, {"transformer_vq/nn/stack.py:7": 3}),),
        "speeds": (Speed("training", 2048, 4, "fp32", 1000.0, 0.5, 0.25),),
        "precision": "fp32",
        "matmul_rate": 1e11,
        "quick": False,
        "seconds": 12.0,
    }
    return Diagnosis(**(fields | changes))


def test_report_shows_all_findings_and_ends_with_the_summary():
    text = report.markdown(diagnosis())
    assert "| auto | fp32 | 2.0e-07 | 1.0e-05 | ok | 80 cases, worst: mqa, output |" in text
    assert "| triton | all |  |  | skipped | needs a GPU |" in text
    assert "| training | 2,048 | 4 | fp32 | 1,000 | 0.50 | 0.250 |" in text
    assert "- 3 x transformer_vq/nn/stack.py:7" in text
    assert "100 GFLOP/s" in text
    assert text.splitlines()[-1] == report.summary(diagnosis())


def test_tables_have_the_same_number_of_columns_in_every_row():
    failed = Speed("training", 2048, 4, "fp32", failed="out of memory")
    text = report.markdown(diagnosis(checks=(FINE, BROKEN), speeds=(failed,)))
    for table in text.split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"checks": (FINE, BROKEN)}, ["matmul (bf16)"]),
        ({"repeats": (Repeat("decoder", "differs", "logits"),)}, []),
        ({"repeats": (Repeat("decoder", "FAILED", "crash"),)}, ["decoder"]),
        ({"syncs": (Syncs("decoding", None, note="crash", failed=True),)}, ["decoding"]),
        ({"speeds": (Speed("training", 8, 1, "fp32", failed="out of memory"),)}, []),
    ],
)
def test_only_checks_and_crashes_are_failures(changes, failed):
    found = diagnosis(**changes)
    assert found.failed == failed
    assert ("FAILED" in report.summary(found)) == bool(failed)
    assert all(name in report.summary(found) for name in failed)
    assert report.record(found)["ok"] == (not failed)


def test_record_is_json():
    record = json.loads(json.dumps(report.record(diagnosis())))
    assert record["checks"][0]["error"] == 2e-7
    assert record["environment"]["versions"]["PyTorch"] == torch.__version__


def test_report_names_no_folder_host_or_user(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/home/someone/lib/libjemalloc.so")
    text = report.markdown(diagnosis()) + json.dumps(report.record(diagnosis()))
    assert "libjemalloc.so" in text
    for place in (Path.home(), Path.cwd(), Path(torch.__file__).parent, "/home/someone"):
        assert str(place) not in text
    assert platform.node() not in text


def test_messages_lose_folders_and_names(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "my-machine")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    found = without_places("OSError: /home/alice/x/y.cpp:12: alice@my-machine failed | 1/2\nmore")
    assert found == "OSError: .../y.cpp:12: ...@... failed / 1/2"
    assert without_places("") == ""
    assert len(without_places("x" * 999)) < MAX_NOTE + 5
    assert without_places("~/.cache/a b") == ".../a b"


def test_environment_of_a_gpu_survives_a_driver_that_cannot_be_read(monkeypatch):
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 24 * 10**9))
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    found = environment(torch.device("cuda"))
    assert found.device["GPU"] == "Some GPU, capability 9.0"
    assert found.device["GPU memory"] == "24.0 GB, 20.0 GB free"
    assert found.versions["driver"].startswith("unknown")


def test_environment_reports_versions_memory_and_settings(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = environment(torch.device("cpu"))
    assert {"device", "CPU", "cores", "threads", "instruction sets", "host memory"} <= set(
        found.device
    )
    assert {"transformer_vq", "Python", "PyTorch", "CUDA", "triton", "OS"} <= set(found.versions)
    assert found.settings["OMP_NUM_THREADS"] == "3"
    assert found.settings["deterministic algorithms"] == "on"  # set by the tests
