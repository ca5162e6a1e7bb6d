"""Checks in subprocesses: the end of the process is a row."""

import pytest
import torch

from transformer_vq.bench.records import Failure
from transformer_vq.doctor import isolated
from transformer_vq.doctor.findings import Check
from transformer_vq.doctor.samples import Sizes

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("shga", "gqa"))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("failed", "status"),
    [("exit status -11", "FAILED"), ("exceeded the time limit of 180 s", "skipped")],
)
def test_death_of_the_subprocess_is_a_row(monkeypatch, failed, status):
    monkeypatch.setattr(isolated, "in_subprocess", lambda *_, **__: Failure(failed=failed))
    first, second, _ = isolated.checks(SMALL, CPU, quick=False)
    assert first() == [Check("compiled attention", "all", status, note=failed)]
    assert second() == [Check("compiled decoder", "all", status, note=failed)]


def test_quick_does_not_compile(monkeypatch):
    monkeypatch.setattr(isolated, "in_subprocess", None)
    rows = [row for task in isolated.checks(SMALL, CPU, quick=True) for row in task()]
    assert [row.status for row in rows] == ["skipped"] * 3


@pytest.mark.parametrize("work", [isolated.compiled_attention, isolated.compiled_decoder])
def test_compiled_paths_are_compared_with_float64(monkeypatch, work):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (row,) = work(SMALL, CPU)
    assert row.status == "ok"
    assert row.n_cases > 0


def test_triton_kernels_are_checked_in_all_precisions_and_repeated(monkeypatch):
    """On a CPU without the kernels, every row is a failure and not an exception."""
    rows = isolated.triton(SMALL, CPU)
    paths = ["triton", "decode, triton"] * 2 + ["training step, triton"]
    assert [row.path for row in rows] == paths
    assert {row.status for row in rows} == {"FAILED"}


@pytest.mark.slow
def test_compiled_paths_pass_in_a_subprocess():
    rows = [row for task in isolated.checks(SMALL, CPU, quick=False) for row in task()]
    assert [row.status for row in rows] == ["ok", "ok", "skipped"]
