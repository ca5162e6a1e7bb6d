"""Optimizers and the learning rate schedule against the formulas in NumPy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import assert_close, tiny_config

from transformer_vq import PRESETS, TransformerVQ
from transformer_vq.config import OptimConfig
from transformer_vq.training.optim import (
    Adafactor,
    AdamW,
    Muon,
    learning_rate,
    make_optimizer,
    orthogonalize,
)


def test_learning_rate_follows_the_schedule_of_the_paper():
    config = PRESETS["enwik8-190m"].optim
    rate = [learning_rate(config, step, 125_000) for step in range(125_001)]
    assert rate[0] == 0.0
    assert rate[1] == pytest.approx(4e-8)
    assert rate[10_000] == pytest.approx(4e-4)
    assert rate[67_500] == pytest.approx((4e-4 + 4e-5) / 2)  # halfway down the cosine
    assert rate[125_000] == pytest.approx(4e-5)
    assert max(rate) == rate[10_000]
    assert rate[:10_001] == sorted(rate[:10_001])
    assert rate[10_000:] == sorted(rate[10_000:], reverse=True)
    assert learning_rate(config, 200_000, 125_000) == pytest.approx(4e-5)


def test_wsd_warms_up_stays_constant_and_decays_at_the_end():
    config = OptimConfig(schedule="wsd", lr=0.8, warmup=10, decay_share=0.25, lr_final_share=0.5)
    rate = [learning_rate(config, step, 100) for step in range(102)]
    assert rate[:11] == pytest.approx([0.08 * step for step in range(11)])
    assert set(rate[10:76]) == {0.8}
    for step in range(76, 101):
        assert rate[step] == pytest.approx(0.4 + 0.4 * (1 - math.sqrt((step - 75) / 25)))
    assert rate[101] == rate[100] == pytest.approx(0.4)
    assert [learning_rate(config, step, 500) for step in range(76)] == rate[:76]
    assert config.decay_start(100) == 75


def test_learning_rate_without_warmup_starts_at_the_peak():
    assert learning_rate(OptimConfig(lr=0.1, warmup=0), 0, 10) == pytest.approx(0.1)


def test_adamw_matches_numpy_with_decay_independent_of_the_learning_rate():
    beta1, beta2, eps, decay = 0.9, 0.98, 1e-9, 0.125
    p = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    optimizer = AdamW(
        [{"params": [p], "decay_per_step": decay}], lr=0.0, betas=(beta1, beta2), eps=eps
    )
    want, m, v = np.array([[1.0, -2.0]]), np.zeros((1, 2)), np.zeros((1, 2))
    for t, (rate, grad) in enumerate(
        [(0.0, [0.3, 0.1]), (0.01, [-0.2, 0.4]), (0.02, [0.5, 0.5])], 1
    ):
        grad = np.array([grad])
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        want = want - rate * step - decay * want
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.from_numpy(grad)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "is_factored"),
    [
        *(((3,), False), ((4, 5), False), ((), False), ((200, 3), False)),
        *(((128, 130), True), ((130, 128), True), ((2, 128, 129), True)),
    ],
    ids=str,
)
def test_adafactor_matches_numpy(shape, is_factored):
    """`torch.optim.Adafactor` would cap the learning rate at 1 / sqrt(t)."""
    generator = np.random.default_rng(0)
    want = np.asarray(generator.normal(size=shape))
    p = torch.tensor(want, requires_grad=True)
    optimizer = Adafactor([p], lr=0.0)
    v = v_row = v_col = 0.0
    for t in range(1, 5):
        grad = np.asarray(generator.normal(size=shape)) * 10.0**t
        beta2 = 1 - t**-0.8
        squared = grad**2 + 1e-30
        v = beta2 * v + (1 - beta2) * squared
        if is_factored:
            largest = int(np.argmax(shape))
            second = next(a for a in range(len(shape)) if a != largest and shape[a] >= 128)
            v_row = beta2 * v_row + (1 - beta2) * squared.mean(largest, keepdims=True)
            v_col = beta2 * v_col + (1 - beta2) * squared.mean(second, keepdims=True)
            update = grad / np.sqrt(v_row * v_col / v_row.mean(second, keepdims=True))
        else:
            update = grad / np.sqrt(v)
        update = update / max(1.0, math.sqrt(np.mean(update**2)))
        want = want - 0.5 * t * max(1e-3, math.sqrt(np.mean(want**2))) * update
        optimizer.param_groups[0]["lr"] = 0.5 * t
        p.grad = torch.tensor(grad)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), want, rtol=1e-10)
    moments = {name: x for name, x in optimizer.state[p].items() if name != "step"}
    assert set(moments) == ({"v_row", "v_col"} if is_factored else {"v"})
    assert (sum(x.numel() for x in moments.values()) < p.numel() / 10) == is_factored


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_decays_only_matrices_and_leaves_codebooks_unchanged(name):
    model = TransformerVQ(tiny_config(absolute_positions=True))
    config = OptimConfig(optimizer=name, lr=1e-3, weight_decay=0.5)
    optimizer = make_optimizer(dict(model.named_parameters()), config)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in g["params"]} for g in optimizer.param_groups)
    assert [g["decay_per_step"] for g in optimizer.param_groups] == [0.5, 0.0]
    assert decayed | plain == set(names.values())
    assert all(n.endswith(".weight") for n in decayed)
    assert all(n.endswith((".u", ".v", "scale", "bias")) for n in plain)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 0.5 if name in decayed else 1.0
        torch.testing.assert_close(p.detach(), factor * before[name])


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)], ids=str)
def test_orthogonalize_keeps_singular_vectors_and_equalizes_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    got = orthogonalize(1e3 * x)
    in_basis = u.T @ got @ vt.T
    assert_close(
        "off the diagonal",
        in_basis - in_basis.diag().diag() + torch.eye(len(s)),
        torch.eye(len(s), dtype=torch.float64),
    )
    assert float(in_basis.diag().min()) > 0.5
    assert float(in_basis.diag().max()) < 1.3


def test_muon_matches_the_formula_and_gives_the_other_parameters_to_adamw():
    model = TransformerVQ(tiny_config()).double()
    other = TransformerVQ(tiny_config()).double()
    other.load_state_dict(model.state_dict())
    config = OptimConfig(optimizer="muon", lr=0.02, weight_decay=0.01)
    optimizer = make_optimizer(dict(model.named_parameters()), config)
    adamw = make_optimizer(dict(other.named_parameters()), replace(config, optimizer="adamw"))
    assert isinstance(optimizer, Muon)
    name = "branches.0.v_proj.weight"
    want, momentum = model.get_parameter(name).detach().clone(), 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            q.grad = p.grad.clone()
        grad = model.get_parameter(name).grad
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonalize(0.05 * grad + 0.95 * momentum)
        want = (1 - 0.01) * want - 0.02 * 0.2 * max(want.shape) ** 0.5 * update
        optimizer.step()
        adamw.step()
        assert model.get_parameter(name).grad is grad
    assert_close(name, model.get_parameter(name), want)
    for name, p in model.named_parameters():
        is_hidden = name.startswith("branches.") and p.ndim > 1
        assert torch.equal(p, other.get_parameter(name)) != is_hidden
        assert set(optimizer.state[p]) == (
            {"step", "momentum"} if is_hidden else {"step", "exp_avg", "exp_avg_sq"}
        )
