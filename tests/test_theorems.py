"""Numerical checks of Theorem 2.2 and its corollaries: quantization minimizes the score error.

The keys are quantized by `VectorQuantizer`; the expected error is computed from the distances to
all codewords.
"""

import pytest
import torch
from helpers import assert_close
from torch import Tensor

from transformer_vq import VectorQuantizer

D, S, N = 4, 8, 20_000


def isotropic_queries(sigma: float) -> Tensor:
    """Return a finite set of queries, +-sigma sqrt(D) e_d, with E[q q^T] = sigma^2 I exactly."""
    axes = torch.eye(D, dtype=torch.float64) * sigma * D**0.5
    return torch.cat([axes, -axes])


def score_error(q: Tensor, k: Tensor, k_hat: Tensor) -> Tensor:
    """Return the mean of (q . k - q . k_hat)^2 over all pairs of q and k."""
    return ((k - k_hat) @ q.T).square().mean()


def quantize(k: Tensor, codebook: Tensor) -> Tensor:
    """Return the codewords that a quantizer with this codebook selects for the keys."""
    quantizer = VectorQuantizer(len(codebook), D).double()
    quantizer.c_sum.copy_(codebook)
    return quantizer(k[None, None]).k_hat[0, 0]


def least_key_error(k: Tensor, codebook: Tensor) -> Tensor:
    """Return the mean squared distance between a key and its nearest codeword."""
    distances = (k[:, None] - codebook).square().sum(-1)  # [key, code]
    return distances.min(-1).values.mean()


def test_theorem_2_2_score_error_is_proportional_to_key_error():
    k = torch.randn(N, D, dtype=torch.float64) @ torch.randn(D, D, dtype=torch.float64)
    codebook = torch.randn(S, D, dtype=torch.float64)
    for sigma in (0.5, 2.0):
        q = isotropic_queries(sigma)
        assert_close("isotropy", q.T @ q / len(q), sigma**2 * torch.eye(D, dtype=torch.float64))
        got = score_error(q, k, quantize(k, codebook))
        assert_close("score error", got, sigma**2 * least_key_error(k, codebook))


def test_corollary_2_3_nearest_codewords_minimize_the_score_error():
    k = torch.randn(500, D, dtype=torch.float64)
    codebook = torch.randn(S, D, dtype=torch.float64)
    q = isotropic_queries(1.0)
    k_hat = quantize(k, codebook)
    best = score_error(q, k, k_hat)
    for _ in range(50):
        assert best < score_error(q, k, codebook[torch.randint(S, (500,))])
    # Changing the codeword of a single key increases the error too.
    for key in range(20):
        for codeword in codebook:
            if not torch.equal(codeword, k_hat[key]):
                changed = k_hat.clone()
                changed[key] = codeword
                assert best < score_error(q, k, changed)


def test_corollary_2_4_score_error_and_key_error_rank_codebooks_equally():
    """Compare three codebooks for clustered keys, from best to worst.

    A quantizer that always selected the first codeword would rank them in reverse: the better the
    codebook, the farther its first codeword is from the mean. One that selected the second nearest
    would rank the first codebook below the second, which contains every codeword twice.
    """
    centers = torch.cat([torch.eye(D, dtype=torch.float64), -torch.eye(D, dtype=torch.float64)])
    # The first center has the largest norm.
    centers *= torch.arange(S, 0, -1, dtype=torch.float64)[:, None]
    k = (centers[:, None] + 0.1 * torch.randn(S, 50, D, dtype=torch.float64)).flatten(0, 1)
    all_centers = centers
    half_repeated = centers[1::2].repeat(2, 1)
    mean_only = k.mean(0).expand(S, -1)
    codebooks = [all_centers, half_repeated, mean_only]
    q = isotropic_queries(3.0)
    by_key = [float(least_key_error(k, c)) for c in codebooks]
    by_score = [float(score_error(q, k, quantize(k, c))) for c in codebooks]
    assert by_key[0] < by_key[1] < by_key[2]
    assert by_score[0] < by_score[1] < by_score[2]


def test_remark_2_5_moving_averages_lower_the_error():
    """EMA codebook learning is approximate k-means and minimizes the same objective."""
    k = torch.randn(1, 1, 2000, D) + 2 * torch.randint(-1, 2, (1, 1, 2000, D))
    q = isotropic_queries(1.0).float()
    quantizer = VectorQuantizer(32, D, ema_decay=0.8, codebook_init="keys")
    errors = []
    for _ in range(40):
        out = quantizer(k)
        errors.append(float(score_error(q, k[0, 0], out.k_hat[0, 0])))
        least = float(least_key_error(k[0, 0], quantizer.codebook[0]))
        assert errors[-1] == pytest.approx(least, rel=1e-5)
        quantizer.update_codebook(out.usage)
    assert errors[-1] < 0.9 * errors[1] < errors[0]
