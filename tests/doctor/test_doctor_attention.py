"""The attention of the doctor: its reference is right, and broken paths are found."""

from dataclasses import replace

import pytest
import torch

from transformer_vq.doctor import attention, isolated, samples
from transformer_vq.doctor.attention import BF16, FP32, TF32, check_path, compare, solve
from transformer_vq.doctor.samples import (
    ALL_HEADS,
    GPU_SIZES,
    Sizes,
    definition,
    linear_time,
    problems,
)
from transformer_vq.ops import reductions
from transformer_vq.ops.cache import CacheStats

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("shga", "gqa"))
ALL = replace(SMALL, head_types=ALL_HEADS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def solved():
    return solve(SMALL, torch.float32)


def run_checks(solved, precision=FP32):
    return {x.path: x for x in (f() for f in attention.checks(lambda: solved, precision, CPU))}


def test_problems_cover_head_types_carried_state_padding_and_documents():
    found = list(problems(ALL, torch.float32))
    assert len({problem.name for problem in found}) == len(found) == 4 * 4
    assert all(problem.cuts for problem in found if problem.scenario != "one segment")
    assert all(x.valid is not None and not x.valid.all() for x in found if x.scenario == "padding")
    documents = [x.document_ids for x in found if x.scenario == "documents"]
    assert all((ids.amax(1) > ids.amin(1)).any() for ids in documents)


@pytest.mark.parametrize("problem", [*problems(ALL, torch.float64)], ids=lambda x: x.name)
def test_definition_equals_linear_time_in_float64(problem):
    """The library proves the same equality on its own; this tests how the doctor sets it up."""
    tensors = [problem.tensors.to(CPU, torch.float64) for _ in range(2)]
    want, got = definition(problem, tensors[0]), linear_time(problem, tensors[1], "auto")
    assert attention.relative_error(got, want.detach()) < 1e-13
    gradients = [
        torch.autograd.grad(output, list(x.leaves.values()), problem.probe)
        for output, x in zip((want, got), tensors, strict=True)
    ]
    for want_gradient, got_gradient in zip(*gradients, strict=True):
        assert attention.relative_error(got_gradient, want_gradient) < 1e-13


def test_all_paths_pass_in_fp32_with_outputs_and_gradients(solved):
    found = run_checks(solved)
    names = ["quadratic", "auto", "serial", "matmul", "associative", "input_scan", "decode"]
    assert list(found) == names
    assert all(x.status == "ok" and x.error <= x.tolerance for x in found.values())
    assert found["serial"].n_cases == 8 * 5
    assert found["decode"].n_cases == 2


def test_bf16_has_a_larger_error_and_passes():
    solved = solve(SMALL, torch.bfloat16)
    found = compare(solved, BF16, CPU, lambda p, x: linear_time(p, x, "auto"))
    assert 1e-4 < found.worst[1] < BF16.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda x: x.name)
def test_sizes_for_gpus_pass_on_a_cpu(precision):
    found = run_checks(solve(GPU_SIZES, precision.dtype), precision)
    assert {x.status for x in found.values()} == {"ok"}


def test_broken_reduction_fails_and_the_others_pass(solved, monkeypatch):
    right = reductions._matmul
    # The means of all codes are slightly wrong.
    monkeypatch.setattr(
        reductions, "_matmul", lambda x: CacheStats(1.01 * right(x).mean, right(x).count)
    )
    found = run_checks(solved)
    assert {x.path for x in found.values() if x.status == "FAILED"} == {"matmul"}
    assert found["matmul"].error > found["matmul"].tolerance
    assert "worst" in found["matmul"].note


def test_wrong_gradient_fails(solved, monkeypatch):
    right = samples.vq_attention

    def without_gradient_of_values(q, k_hat, z, v, *rest, **options):
        return right(q, k_hat, z, v.detach() + 0 * v, *rest, **options)

    monkeypatch.setattr(samples, "vq_attention", without_gradient_of_values)
    found = check_path(
        "serial", lambda p, x: linear_time(p, x, "serial"), lambda: solved, FP32, CPU
    )
    assert found.status == "FAILED"
    assert "gradient of v" in found.note


def raising(error):
    def path(problem, x):
        raise error

    return path


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (RuntimeError("CUDA error: an illegal memory access"), "FAILED", "illegal memory access"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "FAILED", "out of memory"),
        (RuntimeError("InvalidCxxCompiler: no g++"), "skipped", "C++ compiler"),
        (AssertionError(), "FAILED", "AssertionError"),
    ],
)
def test_exceptions_become_rows(solved, error, status, note):
    found = check_path("serial", raising(error), lambda: solved, FP32, CPU)
    assert found.status == status
    assert note in found.note
    assert found.error is None


def test_ctrl_c_is_not_a_row(solved):
    with pytest.raises(KeyboardInterrupt):
        check_path("serial", raising(KeyboardInterrupt()), lambda: solved, FP32, CPU)


def test_nan_fails(solved):
    found = check_path(
        "serial",
        lambda p, x: x.q.sum() * p.probe.float() * torch.nan,
        lambda: [replace(solved[0], gradients={})],
        FP32,
        CPU,
    )
    assert found.status == "FAILED"
    assert "not finite" in found.note


def test_matmul_precision_is_restored_after_a_check():
    before = torch.get_float32_matmul_precision()
    with attention.matmul_rounding(TF32):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_triton_is_skipped_with_a_reason_where_it_cannot_run(monkeypatch):
    assert [x.name for x in attention.precisions(torch.device("cuda"))] == ["fp32", "tf32", "bf16"]
    monkeypatch.setattr(attention, "get_args", lambda _: ("auto", "triton"))
    assert attention.why_no_triton(CPU) == "needs a GPU"
    assert attention.why_no_triton(torch.device("cuda")) == ""
    assert attention.reductions() == ["auto"]
    (row,) = isolated.checks(SMALL, CPU, quick=True)[-1]()
    assert (row.path, row.status) == ("triton", "skipped")
