"""The quantizer against plain loops, and the rules of its codebook."""

import math
from functools import reduce
from itertools import pairwise, product
from operator import add

import pytest
import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq import CodeUsage, UserError, VectorQuantizer
from transformer_vq.nn import quantizer as quantizer_module
from transformer_vq.nn.quantizer import token_priority

B, H, T, K, S = 2, 3, 11, 4, 6


def quantizer_and_keys(**options) -> tuple[VectorQuantizer, torch.Tensor]:
    """With the paper's codebook (random, no revival) unless given otherwise."""
    options = {"codebook_init": "random", "revive_below": 0.0, **options}
    quantizer = VectorQuantizer(S, K, H, **options).double()
    return quantizer, torch.randn(B, H, T, K, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: size} for name in ("n_code", "d_k", "n_head") for size in (0, -1, 2.5, "4", None)),
        *({"ema_decay": x} for x in (1.0, -0.1, math.nan)),
        *({"revive_below": x} for x in (-1.0, math.nan)),
        {"codebook_init": "zeros"},
    ],
    ids=str,
)
def test_impossible_quantizers_are_rejected_by_the_name_of_the_parameter(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=rf"^{name}="):
        VectorQuantizer(**{"n_code": S, "d_k": K} | wrong)


def test_each_key_is_replaced_bitwise_by_its_nearest_codeword():
    quantizer, k = quantizer_and_keys()
    k = k.detach()
    out = quantizer(k)
    codebook = quantizer.codebook
    for b, h, t in product(range(B), range(H), range(T)):
        distances = [float((k[b, h, t] - codebook[h, s]).norm()) for s in range(S)]
        assert out.z[b, h, t] == distances.index(min(distances))
        assert torch.equal(out.k_hat[b, h, t], codebook[h, out.z[b, h, t]])


def test_ties_go_to_the_first_code():
    quantizer = VectorQuantizer(3, 1)
    quantizer.c_sum.copy_(torch.tensor([[[-1.0], [1.0], [1.0]]]))
    assert quantizer(torch.tensor([0.0, 2.0]).view(1, 1, 2, 1)).z.flatten().tolist() == [0, 1]


def test_the_gradient_is_straight_through():
    quantizer, k = quantizer_and_keys()
    probe = torch.randn_like(k)
    (grad,) = torch.autograd.grad((quantizer(k).k_hat * probe).sum(), k)
    assert torch.equal(grad, probe)


@pytest.mark.parametrize("masked", [False, True])
def test_commit_loss_is_summed_over_width_and_heads_and_averaged_over_tokens(masked):
    quantizer, k = quantizer_and_keys()
    valid = torch.rand(B, T) < 0.6 if masked else torch.ones(B, T, dtype=torch.bool)
    out = quantizer(k, valid if masked else None)
    want, n_tokens = 0.0, int(valid.sum())
    for b, h, t in product(range(B), range(H), range(T)):
        codeword = quantizer.codebook[h, out.z[b, h, t]]
        want += float((k[b, h, t].detach() - codeword).square().sum()) * bool(valid[b, t])
    assert float(out.commit_loss.detach()) == pytest.approx(want / n_tokens, rel=1e-12)
    (grad,) = torch.autograd.grad(out.commit_loss, k)
    want_grad = 2 * (k - out.k_hat).detach() * valid[:, None, :, None] / n_tokens
    assert_close("gradient", grad, want_grad)


@pytest.mark.parametrize("masked", [False, True])
def test_update_codebook_equals_the_moving_average_by_hand(masked):
    quantizer, k = quantizer_and_keys(ema_decay=0.9)
    valid = torch.rand(B, T) < 0.6 if masked else None
    out = quantizer(k, valid)
    want_sum, want_count = 0.9 * quantizer.c_sum, 0.9 * quantizer.c_count
    for b, h, t in product(range(B), range(H), range(T)):
        if valid is None or valid[b, t]:
            want_sum[h, out.z[b, h, t]] += 0.1 * k[b, h, t].detach()
            want_count[h, out.z[b, h, t]] += 0.1
    quantizer.update_codebook(out.usage)
    assert_close("sum", quantizer.c_sum, want_sum)
    assert_close("count", quantizer.c_count, want_count)
    assert_close("codebook", quantizer.codebook, want_sum / want_count[..., None])


def test_forward_never_changes_a_codebook():
    quantizer, k = quantizer_and_keys(codebook_init="keys", revive_below=0.5)
    before = {name: buffer.clone() for name, buffer in quantizer.named_buffers()}
    for mode in (True, False):
        quantizer.train(mode)
        quantizer(k)
        for name, buffer in quantizer.named_buffers():
            assert torch.equal(buffer, before[name])


def test_health_of_a_known_usage():
    usage = CodeUsage(
        sum=torch.zeros(1, 4, 2),
        count=torch.tensor([[2.0, 2.0, 0.0, 0.0]]),
        error=torch.tensor([3.0]),
        energy=torch.tensor([12.0]),
    )
    health = usage.health()
    assert health.share_in_use == 0.5
    assert health.perplexity == pytest.approx(2.0)
    assert health.relative_error == pytest.approx(0.25)


def test_codes_start_as_keys_of_the_first_batch_and_keep_learning():
    quantizer, k = quantizer_and_keys(codebook_init="keys")
    quantizer.update_codebook(quantizer(k).usage)
    for h in range(H):
        keys = k[:, h].reshape(-1, K)
        for codeword in quantizer.codebook[h]:
            assert (keys == codeword).all(-1).any()
    assert torch.equal(quantizer.c_count, torch.ones_like(quantizer.c_count))
    first = quantizer.codebook.clone()
    quantizer.update_codebook(quantizer(k).usage)
    assert not torch.equal(quantizer.codebook, first)
    assert quantizer(k).usage.health().relative_error < 1.0


def test_only_valid_keys_become_codes_even_if_there_are_few():
    quantizer, k = quantizer_and_keys(codebook_init="keys")
    valid = torch.zeros(B, T, dtype=torch.bool)
    valid[1, 4:6] = True
    quantizer.update_codebook(quantizer(k, valid).usage)
    for h in range(H):
        for codeword in quantizer.codebook[h]:
            assert (k[1, h, 4:6] == codeword).all(-1).any()


@given(n_parts=st.integers(1, 5), seed=st.integers(0, 99), padding=st.booleans())
def test_candidates_do_not_depend_on_how_a_batch_is_split(n_parts, seed, padding):
    generator = torch.Generator().manual_seed(seed)
    quantizer, k = quantizer_and_keys(codebook_init="keys")
    priority = torch.randint(2**62, (B, T), generator=generator)
    valid = torch.rand(B, T, generator=generator) < 0.4 if padding else torch.ones(B, T).bool()
    whole = quantizer(k, valid, priority).usage
    cuts = sorted(torch.randint(T + 1, (n_parts - 1,), generator=generator).tolist())
    usages = [
        quantizer(k[row : row + 1, :, a:b], valid[row : row + 1, a:b], priority[row, a:b]).usage
        for row in range(B)
        for a, b in pairwise([0, *cuts, T])
        if a < b
    ]
    order = torch.randperm(len(usages), generator=generator).tolist()
    merged = reduce(add, [usages[i] for i in order])
    n_keys = int(valid.sum())
    assert torch.equal(merged.priority, whole.priority)
    assert torch.equal(merged.candidates[:, :n_keys], whole.candidates[:, :n_keys])
    others = [VectorQuantizer(S, K, H, codebook_init="keys").double() for _ in range(2)]
    others[1].load_state_dict(others[0].state_dict())
    for other, usage in zip(others, (whole, merged), strict=True):
        other.update_codebook(usage)
    assert_close("codebook", others[1].codebook, others[0].codebook)


def test_evaluation_draws_no_random_number_and_has_no_candidates():
    quantizer, k = quantizer_and_keys(codebook_init="keys", revive_below=0.1)
    before = torch.get_rng_state()
    assert quantizer.eval()(k).usage.candidates is None
    assert quantizer.train()(k).usage.candidates is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_priority_of_a_token_depends_only_on_row_and_place():
    whole = token_priority(6, 9)
    assert len(whole.unique()) == whole.numel()
    assert torch.equal(token_priority(2, 9, first_row=4), whole[4:])
    left_padded = torch.arange(12) >= 3
    padded = token_priority(6, 12, left_padded.expand(6, 12))
    assert torch.equal(padded[:, 3:], whole)
    large = token_priority(64, 2048).double() / 2**62
    assert float(large.mean()) == pytest.approx(0.5, abs=0.01)
    rows = large.mean(1)
    assert float(rows.std()) == pytest.approx(12**-0.5 / 2048**0.5, rel=0.3)


def test_unused_codes_are_revived_with_sum_and_count_together():
    quantizer, k = quantizer_and_keys(revive_below=0.05)
    with torch.no_grad():
        quantizer.c_sum[:, 0] = 1e6  # far from all keys
        quantizer.c_count[:, 0] = 0.05
    quantizer.update_codebook(quantizer(k).usage)
    assert torch.equal(quantizer.c_count[:, 0], torch.ones(H, dtype=torch.float64))
    for h in range(H):
        assert (k[:, h].reshape(-1, K) == quantizer.codebook[h, 0]).all(-1).any()
    assert quantizer_and_keys()[0](k).usage.candidates is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_that_are_not_finite_are_rejected(bad):
    quantizer, k = quantizer_and_keys()
    k = k.detach().clone()
    k[0, 1, 2, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantizer(k)


def test_keys_and_usages_of_another_shape_are_rejected():
    quantizer, k = quantizer_and_keys()
    with pytest.raises(ValueError, match=r"want \[b, 3, t, 4\]"):
        quantizer(k[:, :2])
    with pytest.raises(ValueError, match="cannot update"):
        VectorQuantizer(S + 1, K, H).update_codebook(quantizer(k).usage)


def test_training_without_codebook_updates_gives_a_warning(monkeypatch):
    monkeypatch.setattr(quantizer_module, "MAX_UNUSED", 3)
    quantizer, k = quantizer_and_keys()
    usages = [quantizer(k).usage for _ in range(2)]
    with pytest.warns(UserWarning, match="3 training passes without an update of the codebook"):
        quantizer(k)
    quantizer(k)  # once is enough
    quantizer.update_codebook(usages[0] + usages[1])
    for _ in range(2):
        quantizer(k)
    quantizer.eval()
    for _ in range(3):
        quantizer(k)
    with torch.no_grad():
        quantizer.train()(k)
