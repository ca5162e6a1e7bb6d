"""Sampling rules: which tokens can be chosen, and that rows do not depend on each other."""

import pytest
import torch

from transformer_vq import Sampling
from transformer_vq.generation.sampling import NOT_FINITE, choose, mark_not_finite

RULES = [
    Sampling(),
    Sampling(0.7),
    Sampling(0.0),
    Sampling(top_p=0.5),
    Sampling(1.3, top_p=0.9, top_k=5),
    Sampling(top_k=1),
]


def tied_logits(n_rows, n, dtype=torch.float32):
    return torch.randint(-4, 5, (n_rows, n)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_is_chosen_as_if_it_were_alone(dtype):
    torch.manual_seed(1)
    logits, uniform = tied_logits(60, 40, dtype), torch.rand(60, dtype=dtype)
    rules = [RULES[i % len(RULES)] for i in range(60)]
    together = choose(rules, logits, uniform)
    alone = [r.choose(logits[i : i + 1], uniform[i : i + 1])[0] for i, r in enumerate(rules)]
    assert together.tolist() == [int(x) for x in alone]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_frequencies_follow_the_rule(rule):
    """A fine grid of random numbers gives each token its share of the allowed mass."""
    logits = torch.tensor([0.3, 2.0, -1.0, 1.9, 0.0, -torch.inf, 1.0], dtype=torch.float64)
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    got = torch.bincount(rule.choose(logits.expand(20_000, -1), uniform), minlength=7) / 20_000
    p, order = (logits / max(rule.temperature, 1e-9)).softmax(-1).sort(descending=True)
    keep = p.cumsum(-1) - p < rule.top_p
    keep &= torch.arange(7) < (rule.top_k or 7)
    want = torch.zeros(7, dtype=torch.float64)
    want[order[keep]] = p[keep] / p[keep].sum()
    assert (got - want).abs().max() < 2e-4


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_number_that_rounds_to_one_chooses_an_allowed_token(rule):
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf, -torch.inf]])
    (token,) = rule.choose(logits, torch.tensor([1.0])).tolist()
    assert token <= 2
    if rule.top_k == 1 or rule.is_greedy:
        assert token == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [1e-46, 5e-324])
def test_the_most_likely_token_is_kept_for_the_smallest_top_p(dtype, top_p):
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=dtype)
    for uniform in (0.0, 0.5, 0.999):
        assert Sampling(top_p=top_p).choose(logits, torch.tensor([uniform])).tolist() == [1]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_without_finite_logits_are_marked_and_their_tokens_are_valid(rule):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[0.0, 3.0, 1.0], [0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf] * 3, [-inf, 9.0, -inf]]
    )
    tokens = rule.choose(logits, torch.zeros(5))
    assert all(0 <= token < 3 for token in tokens.tolist())
    marked = mark_not_finite(tokens, logits)
    assert marked.tolist() == [tokens[0], NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]
