"""tvq doctor: what it finds, the report, the exit status, and errors."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from transformer_vq import doctor
from transformer_vq.cli.main import main
from transformer_vq.doctor import Diagnosis, Finding
from transformer_vq.ops import reductions
from transformer_vq.ops.cache import CacheStats

CPU = torch.device("cpu")
FINE = Finding("Results", "auto", "fp32", "ok", 2e-7, "80 cases, worst: mqa, output")
BROKEN = Finding("Results", "matmul", "bf16", "FAILED", 0.5, "3 of 80")


@pytest.fixture
def few(monkeypatch):
    """Run only the models, with one head type and in this process."""
    chosen = {("Results", "models", "fp32"): doctor.check_models}
    monkeypatch.setattr(doctor, "groups", lambda device, quick: chosen)
    monkeypatch.setattr(doctor, "HEAD_TYPES", ("gqa",))
    monkeypatch.setattr(doctor, "isolated", lambda row, group, device: group(device))


def run(capsys, *arguments):
    """Return the exit status, stdout and stderr of `tvq doctor --quick` on the CPU."""
    capsys.readouterr()
    status = 0
    try:
        main(["doctor", "--quick", "--device", "cpu", *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def diagnosis(*findings):
    return Diagnosis(doctor.environment(CPU), findings, quick=False, seconds=12.0)


def test_every_path_is_checked_and_report_and_json_agree(few, capsys):
    status, out, _ = run(capsys, "--json")
    assert status == 0
    *report, last = out.splitlines()
    record = json.loads(last)
    assert record["ok"]
    assert report[0] == "# tvq doctor --quick"
    assert report[-1] == record["summary"]
    steps = [f"training step, {x}" for x in (*doctor.REDUCTIONS, "full")]
    found = {x["name"]: x["status"] for x in record["findings"]}
    assert found == dict.fromkeys([*steps, "decoder"], "ok")
    assert not any("differ" in x["note"] for x in record["findings"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_key_has_a_clear_nearest_code(monkeypatch, device):
    """Otherwise rounding could select another code, and a correct device would fail."""
    monkeypatch.setattr(doctor.TransformerVQ, "to", lambda model, device: model)
    for heads in doctor.HEAD_TYPES:
        rounded, exact, tokens = doctor.make_models(heads, "serial", torch.device(device))
        for a, b in zip(rounded(tokens).code_usage, exact(tokens).code_usage, strict=True):
            assert torch.equal(a.count.double(), b.count.double())


def test_group_that_crashes_or_takes_too_long_is_a_row(monkeypatch):
    row = Finding("Results", "loss", "bf16", "skipped")
    monkeypatch.setattr(doctor, "TIME_LIMIT", 0.01)
    (found,) = doctor.isolated(row, doctor.check_models, CPU)
    assert (found.status, found.note) == ("skipped", "exceeded the time limit of 0.01 s")
    done = subprocess.CompletedProcess([], -signal.SIGILL, stdout=b"", stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    (found,) = doctor.isolated(row, doctor.check_models, CPU)
    assert (found.status, found.note) == ("FAILED", "killed by signal 4")


def test_broken_reduction_fails_with_status_1(few, monkeypatch, capsys):
    right = reductions._associative
    monkeypatch.setattr(
        reductions, "_associative", lambda x: CacheStats(right(x).mean + 1, right(x).count)
    )
    status, out, err = run(capsys)
    assert status == 1
    failed = [line for line in out.splitlines() if "| FAILED |" in line]
    assert [line.split(" | ")[0] for line in failed] == ["| training step, associative"]
    assert f"tvq: {out.splitlines()[-1]}" in err.splitlines()


def test_exception_is_a_row_without_a_traceback(few, monkeypatch, capsys):
    def crash(*_, **__):
        raise RuntimeError("kernel crashed in /home/someone/kernel.cu")

    monkeypatch.setattr(doctor, "make_models", crash)
    status, out, err = run(capsys)
    assert status == 1
    assert "RuntimeError: kernel crashed in .../kernel.cu" in out
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_bf16_and_the_compiled_decoder_are_compared_with_float64():
    with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
        found = doctor.check_bf16(CPU) + doctor.check_compiled_decoder(CPU)
    names = [*(f"loss, {x}" for x in doctor.REDUCTIONS), "compiled decoder"]
    assert {x.name: x.status for x in found} == dict.fromkeys(names, "ok")


@pytest.mark.slow
def test_speed_is_reported_by_a_subprocess():
    found = doctor.isolated(FINE, doctor.measure_speed, CPU)
    assert [x.name.split(",")[0] for x in found] == ["training", "decoding", "decoding"]
    assert min(x.value for x in found) > 0


@pytest.mark.parametrize(
    ("findings", "failed"),
    [
        ([FINE], []),
        ([FINE, BROKEN], ["matmul (bf16)"]),
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


def test_report_names_no_folder(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/home/someone/lib/libjemalloc.so")
    text = doctor.markdown(diagnosis(FINE)) + json.dumps(doctor.record(diagnosis(FINE)))
    assert "libjemalloc.so" in text
    for place in (Path.home(), Path.cwd(), Path(torch.__file__).parent, "/home/someone"):
        assert str(place) not in text
    found = doctor.without_folders("OSError: /home/alice/x/y.cpp:12: failed | 1/2")
    assert found == "OSError: .../y.cpp:12: failed / 1/2"


def test_groups_skip_what_the_device_does_not_have():
    on_cpu, on_cuda = (doctor.groups(torch.device(x), quick=True) for x in ("cpu", "cuda"))
    assert on_cpu["Results", "triton", "fp32"] == "needs CUDA"
    assert on_cuda["Results", "triton", "fp32"] is doctor.check_triton
    assert {x for key, x in on_cpu.items() if key[0] == "Speed"} == {"--quick"}
