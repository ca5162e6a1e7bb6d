"""tvq doctor: report, JSON, exit status, files and errors."""

import json
import re

import pytest
import torch

from transformer_vq.cli.main import main
from transformer_vq.doctor import examine, samples, speed
from transformer_vq.doctor.report import summary
from transformer_vq.doctor.samples import Sizes
from transformer_vq.ops import reductions
from transformer_vq.ops.cache import CacheStats
from transformer_vq.progress import TerminalReporter, reporting

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("gqa",))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(examine, "CPU_SIZES", SMALL)


@pytest.fixture
def few(small, monkeypatch):
    """Run only the checks of the first precision."""
    every = examine._tasks
    monkeypatch.setattr(examine, "_tasks", lambda *arguments: every(*arguments)[:7])


@pytest.fixture
def last(small, monkeypatch):
    """Run only the last checks: repeated steps and host syncs."""
    every = examine._tasks
    monkeypatch.setattr(examine, "_tasks", lambda *arguments: every(*arguments)[-4:])


def doctor(capsys, *arguments):
    """Return the exit status, stdout and stderr."""
    capsys.readouterr()
    status = 0
    try:
        main(["doctor", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return status or 0, *capsys.readouterr()


def test_quick_checks_everything_on_a_cpu(small, capsys):
    status, out, _ = doctor(capsys, "--device", "cpu", "--quick", "--json")
    assert status == 0
    *report, last = out.splitlines()
    record = json.loads(last)
    assert record["ok"]
    assert report[0] == "# tvq doctor --quick"
    assert report[-1] == record["summary"]
    assert {x["status"] for x in record["checks"]} == {"ok", "skipped"}
    assert {x["dtype"] for x in record["checks"]} == {"fp32", "bf16", "tf32", "all"}
    assert [x["count"] for x in record["syncs"]] == [None, None]
    assert record["speeds"] == []
    assert not re.search(r"(?<![\w.])/[a-z]\w*/", out)


def test_summary_counts_what_the_progress_bar_counts(last, capsys):
    totals = []

    class Totals(TerminalReporter):
        def progress(self, what, total, unit, done=0):
            totals.append(total)
            return super().progress(what, total, unit, done)

    with reporting(Totals()):
        found = examine.examine(torch.device("cpu"), quick=True)
    passed, skipped = map(int, re.search(r"(\d+) passed and (\d+)", summary(found)).groups())
    assert totals == [passed + skipped]


def test_broken_reduction_fails_with_status_1(few, monkeypatch, capsys):
    right = reductions._associative
    monkeypatch.setattr(
        reductions, "_associative", lambda x: CacheStats(right(x).mean + 1, right(x).count)
    )
    status, out, err = doctor(capsys, "--quick", "--device", "cpu")
    assert status == 1
    failed = [line for line in out.splitlines() if "| FAILED |" in line]
    assert [line.split(" | ")[0] for line in failed] == ["| associative"]
    assert [x for x in err.splitlines() if x.startswith("tvq: ")] == [
        f"tvq: {out.splitlines()[-1]}"
    ]


def test_crashing_path_is_a_row_without_a_traceback(few, monkeypatch, capsys):
    def crash(*_, **__):
        raise RuntimeError("kernel crashed in /home/someone/kernel.cu")

    monkeypatch.setattr(samples, "vq_attention", crash)
    status, out, err = doctor(capsys, "--quick", "--device", "cpu")
    assert status == 1
    assert "RuntimeError: kernel crashed in .../kernel.cu" in out
    assert "Traceback" not in out + err
    assert "| quadratic | fp32 |" in out


def test_measurements_are_in_the_report(few, monkeypatch, capsys):
    monkeypatch.setattr(speed, "matmul_rate", lambda plan, device: 1e10)
    row = speed.Speed("training, shga, auto", 2048, 4, "fp32", 123.0, 0.5, 0.75)
    monkeypatch.setattr(speed, "training_speed", lambda cell, rate: row)
    failed = speed.Speed("decoding", 512, 1, "fp32", failed="out of memory")
    monkeypatch.setattr(speed, "decoding_speed", lambda config, n, device: failed)
    status, out, _ = doctor(capsys, "--device", "cpu", "--json")
    assert status == 0
    assert "| 123 | 0.50 | 0.750 |" in out
    assert "| out of memory |" in out
    assert json.loads(out.splitlines()[-1])["matmul_rate"] == 1e10


def test_out_is_written_and_never_replaced_without_overwrite(few, tmp_path, capsys):
    path = tmp_path / "report.md"
    status, out, _ = doctor(capsys, "--quick", "--device", "cpu", "--out", path)
    assert status == 0
    assert path.read_text() == out
    path.write_text("kept")
    status, out, err = doctor(capsys, "--quick", "--device", "cpu", "--out", path)
    assert (status, out) == (2, "")
    assert "--overwrite" in err
    assert path.read_text() == "kept"
    assert doctor(capsys, "--quick", "--device", "cpu", "--out", path, "--overwrite")[0] == 0
    assert path.read_text() != "kept"


@pytest.mark.parametrize("device", ["tpu", "cuda", "cuda:1", "mps", ""])
def test_device_that_is_not_available_is_one_line(monkeypatch, capsys, device):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    status, out, err = doctor(capsys, "--device", device)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("tvq: ")
    assert repr(device) in line


def test_ctrl_c_is_one_line(few, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "vq_attention", interrupt)
    status, out, err = doctor(capsys, "--quick", "--device", "cpu")
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "tvq: interrupted"
