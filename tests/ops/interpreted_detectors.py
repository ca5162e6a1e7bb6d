"""The detectors of `interpreter` find kernels that are broken on purpose.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import RaceError, detectors

from transformer_vq.ops.triton import launch

N, TILE = 20, 16


@triton.jit
def double(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def double_without_mask_on_load(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, 2 * tl.load(x + i), mask=i < n)


@triton.jit
def double_without_mask_on_store(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n, other=0.0))


@triton.jit
def double_with_overlap(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def double_of_the_neighbour(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)
    other = (i + TILE) % n
    tl.store(y + i, 2 * tl.load(y + other, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def sum_with_a_shifted_read(x, y, n, TILE: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, tl.load(x + i - 1, mask=i < n, other=0.0), mask=i < n)


def run(kernel):
    x, y = torch.arange(N, dtype=torch.float32), torch.empty(N)
    tiles = launch.Tiles(TILE, TILE)
    launch.launch(kernel, (2,), {"x": x, "y": y, "n": N}, {"TILE": TILE}, tiles)
    return x, y


def test_a_correct_kernel_passes():
    with detectors():
        x, y = run(double)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (double_without_mask_on_load, "read outside"),
        (sum_with_a_shifted_read, "read outside"),
        (double_without_mask_on_store, "write outside"),
    ],
)
def test_accesses_out_of_bounds_are_found(kernel, kind):
    with detectors(), pytest.raises(Exception, match=kind) as caught:
        run(kernel)
    assert "OutOfBoundsError" in repr(caught.value)


@pytest.mark.parametrize("kernel", [double_with_overlap, double_of_the_neighbour])
def test_programs_that_depend_on_each_other_are_found(kernel):
    with detectors(), pytest.raises(RaceError):
        run(kernel)


def test_programs_run_in_another_order():
    """The result of a kernel that reads its neighbour's output depends on the order of programs."""
    with detectors(check_accesses=False, seed=0):
        a = run(double_of_the_neighbour)[1]
    results = [a]
    for seed in range(1, 8):
        with detectors(check_accesses=False, seed=seed):
            results.append(run(double_of_the_neighbour)[1])
    assert any(not torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for b in results)


def test_guards_spoil_the_result_of_a_read_from_outside():
    with detectors(check_accesses=False):
        _, y = run(sum_with_a_shifted_read)
    assert y[0].isnan()
    assert not y[1:].isnan().any()


def test_overwritten_guards_are_found():
    with detectors(check_accesses=False), pytest.raises(AssertionError, match="guard"):
        run(double_without_mask_on_store)
