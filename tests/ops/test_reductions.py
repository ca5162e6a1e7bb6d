"""Serial, matmul and associative reductions compute the same exclusive prefix."""

import pytest
import torch
from helpers import assert_close

from transformer_vq.ops.cache import CacheStats, block_stats, merge
from transformer_vq.ops.reductions import REDUCTIONS, exclusive_prefix

B, H, S, L, V = 2, 3, 5, 4, 6


def random_blocks(n_blocks: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(S, (B, H, n_blocks, L), generator=generator)
    v = torch.randn(B, H, n_blocks, L, V, generator=generator, dtype=torch.float64)
    return z, v.requires_grad_()


def initial_cache(carried: bool) -> CacheStats:
    if not carried:
        return CacheStats.empty(B, H, S, V, dtype=torch.float64)
    z, v = random_blocks(1, seed=1)
    return block_stats(z[:, :, 0], v[:, :, 0], S)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_reduction_equals_statistics_of_all_earlier_tokens(reduction, n_blocks, carried):
    z, v = random_blocks(n_blocks)
    initial = initial_cache(carried)
    prefix, total = exclusive_prefix(block_stats(z, v, S), initial, reduction)

    want = [
        merge(initial, block_stats(z[:, :, :r].flatten(2), v[:, :, :r].flatten(2, 3), S))
        for r in range(n_blocks + 1)
    ]
    want_mean = torch.stack([stats.mean for stats in want], dim=2)
    assert_close("prefix mean", prefix.mean, want_mean[:, :, :-1])
    assert_close("total mean", total.mean, want_mean[:, :, -1])
    for r, stats in enumerate(want[:-1]):
        assert torch.equal(prefix.count[:, :, r], stats.count)
    assert torch.equal(total.count, want[-1].count)

    probe = torch.randn_like(want_mean)
    got_mean = torch.cat([prefix.mean, total.mean.unsqueeze(2)], dim=2)
    (got_grad,) = torch.autograd.grad((got_mean * probe).sum(), v)
    (want_grad,) = torch.autograd.grad((want_mean * probe).sum(), v)
    assert_close("gradient", got_grad, want_grad)
