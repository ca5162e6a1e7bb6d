"""Theorem 2.2 and its corollaries, numerically: quantization minimises the error of the scores."""

import torch
from helpers import assert_close

from transformer_vq import VectorQuantizer
from transformer_vq.nn.quantizer import nearest_code

D, S, N = 4, 8, 20_000


def isotropic_queries(sigma: float) -> torch.Tensor:
    """Queries with E[q q^T] = sigma^2 I exactly, as a finite distribution: +-sigma sqrt(D) e_d."""
    axes = torch.eye(D, dtype=torch.float64) * sigma * D**0.5
    return torch.cat([axes, -axes])


def score_error(q: torch.Tensor, k: torch.Tensor, k_hat: torch.Tensor) -> torch.Tensor:
    """E over q and k of (q . k - q . k_hat)^2, every pair counted."""
    return ((k - k_hat) @ q.T).square().mean()


def quantize(k: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return codebook[nearest_code(k[None, None], codebook[None])[0, 0]]


def test_theorem_2_2_score_error_is_proportional_to_key_error():
    k = torch.randn(N, D, dtype=torch.float64) @ torch.randn(D, D, dtype=torch.float64)
    codebook = torch.randn(S, D, dtype=torch.float64)
    for sigma in (0.5, 2.0):
        q = isotropic_queries(sigma)
        assert_close("isotropy", q.T @ q / len(q), sigma**2 * torch.eye(D, dtype=torch.float64))
        for phi in (quantize, lambda k, _: k.tanh(), lambda k, _: 0.3 * k + 1):
            k_hat = phi(k, codebook)
            key_error = (k - k_hat).square().sum(-1).mean()
            assert_close("proportional", score_error(q, k, k_hat), sigma**2 * key_error)


def test_theorem_2_2_holds_in_expectation_for_random_queries():
    k = torch.randn(N, D, dtype=torch.float64)
    q = torch.randn(N, D, dtype=torch.float64)  # independent of k, E[q q^T] = I
    k_hat = quantize(k, torch.randn(S, D, dtype=torch.float64))
    sampled = ((k - k_hat) * q).sum(-1).square().mean()
    assert_close("expectation", sampled, (k - k_hat).square().sum(-1).mean(), tolerance=0.05)


def test_corollary_2_3_no_other_choice_of_codewords_is_better():
    k = torch.randn(500, D, dtype=torch.float64)
    codebook = torch.randn(S, D, dtype=torch.float64)
    q = isotropic_queries(1.0)
    best = score_error(q, k, quantize(k, codebook))
    for _ in range(50):
        z = torch.randint(S, (500,))
        assert best < score_error(q, k, codebook[z])
    # Also not one that differs from it in a single key.
    z = nearest_code(k[None, None], codebook[None])[0, 0]
    for key in range(20):
        for other in range(S):
            if other != z[key]:
                changed = z.clone()
                changed[key] = other
                assert best < score_error(q, k, codebook[changed])


def test_corollary_2_4_codebooks_rank_alike_by_score_error_and_by_key_error():
    k = torch.randn(2000, D, dtype=torch.float64)
    q = isotropic_queries(3.0)
    codebooks = [scale * torch.randn(S, D, dtype=torch.float64) for scale in (0.1, 0.5, 1, 2, 4)]
    by_score = [float(score_error(q, k, quantize(k, c))) for c in codebooks]
    by_key = [float((k - quantize(k, c)).square().sum(-1).mean()) for c in codebooks]
    assert sorted(range(5), key=by_score.__getitem__) == sorted(range(5), key=by_key.__getitem__)


def test_remark_2_5_running_means_lower_the_error():
    """The codebook's own learning is approximate k-means: it descends on the same objective."""
    k = torch.randn(1, 1, 2000, D) + 2 * torch.randint(-1, 2, (1, 1, 2000, D))
    q = isotropic_queries(1.0).float()
    quantizer = VectorQuantizer(32, D, ema_decay=0.8, codebook_init="keys")
    errors = []
    for _ in range(40):
        out = quantizer(k)
        errors.append(float(score_error(q, k[0, 0], out.k_hat[0, 0])))
        quantizer.update(out.usage)
    assert errors[-1] < 0.9 * errors[1] < errors[0]
