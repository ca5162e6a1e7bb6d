"""Cache statistics are a monoid, and agree with counting by hand."""

import pytest
import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.ops.cache import CacheStats, block_stats, code_sums, merge

N_CODE, D_V = 5, 3


@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 40))
def test_merge_equals_the_statistics_of_both_token_sets(seed, n_first, n_second):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(N_CODE, (2, n_first + n_second), generator=generator)
    v = torch.randn(2, n_first + n_second, D_V, generator=generator, dtype=torch.float64)
    merged = merge(
        block_stats(z[:, :n_first], v[:, :n_first], N_CODE),
        block_stats(z[:, n_first:], v[:, n_first:], N_CODE),
    )
    whole = block_stats(z, v, N_CODE)
    assert_close("mean", merged.mean, whole.mean)
    assert torch.equal(merged.count, whole.count)
    empty = CacheStats.empty(2, N_CODE, D_V, dtype=torch.float64)
    for same in (merge(whole, empty), merge(empty, whole)):  # the identity, bit for bit
        assert torch.equal(same.mean, whole.mean)
        assert torch.equal(same.count, whole.count)


@pytest.mark.parametrize("masked", [False, True])
def test_code_sums_equal_a_plain_loop(masked):
    z = torch.randint(N_CODE, (2, 4, 9))
    x = torch.randn(2, 4, 9, D_V, dtype=torch.float64)
    valid = torch.rand(2, 1, 9) < 0.5 if masked else None
    total, count = code_sums(z, x, N_CODE, valid)
    want_total, want_count = torch.zeros_like(total), torch.zeros_like(count)
    for b in range(2):
        for h in range(4):
            for t in range(9):
                if valid is None or valid[b, 0, t]:
                    want_total[b, h, z[b, h, t]] += x[b, h, t]
                    want_count[b, h, z[b, h, t]] += 1
    assert_close("sum", total, want_total)
    assert torch.equal(count, want_count)


def test_bfloat16_values_are_averaged_in_float32_and_counted_in_integers():
    z = torch.zeros(1, 1000, dtype=torch.int64)
    v = torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    stats = block_stats(z, v, 2)
    assert (stats.mean.dtype, stats.count.dtype) == (torch.float32, torch.int64)
    assert stats.count.tolist() == [[1000.0, 0.0]]
    assert stats.mean.flatten().tolist() == [1.0, 0.0]
