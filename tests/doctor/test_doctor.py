"""tvq doctor: what it finds, the report, the exit status, and errors."""

import getpass
import json
import os
import platform
import re
import signal
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from transformer_vq import doctor
from transformer_vq.cli.main import main
from transformer_vq.doctor import Diagnosis, Finding, Sizes
from transformer_vq.ops import reductions
from transformer_vq.ops.cache import CacheStats

CPU = torch.device("cpu")
SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("gqa",))
FINE = Finding("Results", "auto", "fp32", "ok", 2e-7, "80 cases, worst: mqa, output")
BROKEN = Finding("Results", "matmul", "bf16", "FAILED", 0.5, "3 of 80")


@pytest.fixture
def few(monkeypatch):
    """Run only the models, with small sizes and in this process."""
    chosen = {("Results", "models", "fp32"): doctor.check_models}
    monkeypatch.setattr(doctor, "groups", lambda device, quick: chosen)
    monkeypatch.setattr(doctor, "CPU_SIZES", SMALL)
    monkeypatch.setattr(doctor, "in_subprocess", lambda work, *rest, seconds: work(*rest))


def run(capsys, *arguments):
    """Return the exit status, stdout and stderr of `tvq doctor`."""
    capsys.readouterr()
    status = 0
    try:
        main(["doctor", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return status or 0, *capsys.readouterr()


def die(sizes, device):
    os.kill(os.getpid(), signal.SIGILL)


def diagnosis(*findings):
    return Diagnosis(doctor.environment(CPU), findings, quick=False, seconds=12.0)


def test_every_path_is_checked_and_no_check_fails():
    found = [
        *doctor.check_models(SMALL, CPU),
        *doctor.check_definition(SMALL, CPU),
        *doctor.check_repeats(SMALL, CPU),
    ]
    assert {x.status for x in found} == {"ok", "equal"}
    names = {x.name for x in found}
    for reduction in ("auto", "serial", "matmul", "associative", "input_scan", "full"):
        assert f"training step, {reduction}" in names
    assert {"states", "decoder", "Definition 3.1"} <= names


@pytest.mark.parametrize("sizes", [doctor.CPU_SIZES, doctor.GPU_SIZES])
def test_every_key_has_a_clear_nearest_code(sizes):
    """Otherwise rounding could select another code, and a correct device would fail."""
    for head_type in sizes.head_types:
        config = sizes.model(head_type)
        tokens = doctor.random_tokens(config, sizes)
        exact = doctor.make_model(config, "serial").double()
        rounded = doctor.make_model(config, "serial")
        usages = [model(tokens).code_usage for model in (exact, rounded)]
        for a, b in zip(*usages, strict=True):
            assert torch.equal(a.count.double(), b.count.double())


def test_group_that_crashes_is_a_row():
    (row,) = doctor.isolated("Results", "loss", "bf16", die, SMALL, CPU)
    assert row.status == "FAILED"
    assert "killed by SIGILL" in row.note
    assert "ONEDNN_MAX_CPU_ISA" in row.note


def test_group_over_the_time_limit_is_skipped(monkeypatch):
    monkeypatch.setattr(doctor, "TIME_LIMIT", 0.01)
    (row,) = doctor.isolated("Results", "models", "fp32", doctor.check_models, SMALL, CPU)
    assert row.status == "skipped"
    assert "time limit" in row.note


def test_training_and_decoding_are_measured(monkeypatch):
    monkeypatch.setattr(doctor, "_speed_model", lambda device: SMALL.model("shga"))
    options = {"seq_len": 8, "tokens": 16, "precision": "fp32"}
    (training,) = doctor.time_training(SMALL, CPU, **options)
    (decoding,) = doctor.time_decoding(SMALL, CPU, batch_size=2)
    assert min(training.value, decoding.value) > 0
    assert "GB peak" in training.note


def test_broken_reduction_fails_with_status_1(few, monkeypatch, capsys):
    right = reductions._associative
    monkeypatch.setattr(
        reductions, "_associative", lambda x: CacheStats(right(x).mean + 1, right(x).count)
    )
    status, out, err = run(capsys, "--quick", "--device", "cpu")
    assert status == 1
    failed = [line for line in out.splitlines() if "| FAILED |" in line]
    assert [line.split(" | ")[0] for line in failed] == ["| training step, associative"]
    assert f"tvq: {out.splitlines()[-1]}" in err.splitlines()


def test_exception_is_a_row_without_a_traceback(few, monkeypatch, capsys):
    def crash(*_, **__):
        raise RuntimeError("kernel crashed in /home/someone/kernel.cu")

    monkeypatch.setattr(doctor, "decoder_errors", crash)
    status, out, err = run(capsys, "--quick", "--device", "cpu")
    assert status == 1
    assert "RuntimeError: kernel crashed in .../kernel.cu" in out
    assert "Traceback" not in out + err


def test_report_and_json_agree_and_out_is_never_replaced(few, tmp_path, capsys):
    path = tmp_path / "report.md"
    options = ("--quick", "--device", "cpu", "--out", path)
    status, out, _ = run(capsys, *options, "--json")
    assert status == 0
    *report, last = out.splitlines()
    record = json.loads(last)
    assert record["ok"]
    assert report[0] == "# tvq doctor --quick"
    assert report[-1] == record["summary"]
    assert path.read_text() == "\n".join(report) + "\n"
    status, out, err = run(capsys, *options)
    assert (status, out) == (2, "")
    assert "--overwrite" in err
    assert run(capsys, *options, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("findings", "failed"),
    [
        ([FINE], []),
        ([FINE, BROKEN], ["matmul (bf16)"]),
        ([Finding("Determinism", "decoder", "fp32", "differs", 3, "logits")], []),
        ([Finding("Speed", "training", "fp32", "FAILED", note="out of memory")], []),
    ],
)
def test_only_checks_are_failures(findings, failed):
    found = diagnosis(*findings)
    assert found.failed == failed
    assert ("FAILED" in doctor.summary(found)) == bool(failed)
    assert doctor.record(found)["ok"] == (not failed)
    rows = [line for line in doctor.markdown(found).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {6}


def test_report_names_no_folder_host_or_user(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/home/someone/lib/libjemalloc.so")
    text = doctor.markdown(diagnosis(FINE)) + json.dumps(doctor.record(diagnosis(FINE)))
    assert "libjemalloc.so" in text
    for place in (Path.home(), Path.cwd(), Path(torch.__file__).parent, "/home/someone"):
        assert str(place) not in text
    assert platform.node() not in text
    monkeypatch.setattr(platform, "node", lambda: "my-machine")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    found = doctor.without_places("OSError: /home/alice/x/y.cpp:12: alice@my-machine failed | 1/2")
    assert found == "OSError: .../y.cpp:12: ...@... failed / 1/2"
    assert not re.search(r"x{170}", doctor.without_places("x" * 999))


def test_syncs_are_counted_by_line(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    code = "\n" * 6 + "warnings.warn('called a synchronizing CUDA operation')"
    sync = compile(code, str(doctor.PACKAGE / "nn" / "model.py"), "exec")
    with doctor.counting() as found:
        for _ in range(3):
            exec(sync, {"warnings": warnings})
        warnings.warn("something else", stacklevel=1)
    assert found == {"transformer_vq/nn/model.py:7": 3}
    assert modes == ["warn", 0]


@pytest.mark.parametrize("device", ["tpu", "cuda", "cuda:1", ""])
def test_device_that_is_not_available_is_one_line(monkeypatch, capsys, device):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    status, out, err = run(capsys, "--device", device)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("tvq: ")
    assert repr(device) in line


def test_groups_skip_what_the_device_does_not_have():
    on_cpu, on_cuda = (doctor.groups(torch.device(x), quick=True) for x in ("cpu", "cuda"))
    assert on_cpu["Results", "triton", "fp32"] == "needs a GPU"
    assert on_cuda["Results", "triton", "fp32"] is doctor.check_triton
    assert isinstance(on_cuda["Results", "loss", "tf32"], partial)
    assert {x for key, x in on_cpu.items() if key[0] == "Speed"} == {"--quick"}
