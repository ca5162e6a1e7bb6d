"""Prefix reuse: a prompt is not read twice, and the result is the same to the last bit."""

import pytest
import torch
from engines import a_prompt, collect, make_engine, solo, text_of

from transformer_vq.generation.prefill import prefill
from transformer_vq.serve.requests import Request, Start

pytestmark = pytest.mark.usefixtures("short_segments")


def test_a_prompt_is_not_read_twice(model):
    engine = make_engine(model)
    first, second = collect(engine, *[Request(a_prompt(70), 4, seed=1)] * 2)
    assert text_of(first) == text_of(second)
    assert engine.counters.prompt_tokens <= 2 * 70
    n_before = engine.counters.prompt_tokens
    (third,) = collect(engine, Request(a_prompt(70), 4, seed=1))
    assert third[-1].end.n_cached == 70
    assert engine.counters.prompt_tokens == n_before
    assert text_of(third) == text_of(first)


@pytest.mark.parametrize(("n_shared", "n_cached"), [(70, 64), (64, 64), (63, 32), (17, 16), (9, 0)])
def test_prompts_with_the_same_beginning_share_it(model, n_shared, n_cached):
    engine = make_engine(model)
    collect(engine, Request(a_prompt(75), 1))
    request = Request([*a_prompt(75)[:n_shared], *a_prompt(30, seed=9)], 8, seed=2)
    (events,) = collect(engine, request)
    assert events[-1].end.n_cached == n_cached
    assert text_of(events) == solo(model, request)


def test_a_reused_prefix_changes_no_bit(model):
    """Cut at the same places, with or without the stored prefix."""
    engine = make_engine(model)
    collect(engine, Request(a_prompt(75), 1))
    prompt = [*a_prompt(75)[:64], *a_prompt(30, seed=9)]
    (events,) = collect(engine, Request(prompt, 0))
    got, want = events[-1].end.context, prefill(model, [prompt])
    assert events[-1].end.n_cached == 64
    assert torch.equal(got.logits, want.logits)
    for name, x in want.state.to_tensors().items():
        assert torch.equal(got.state.to_tensors()[name], x), name


def test_memory_limit_of_prefixes_is_kept(model):
    engine = make_engine(model, memory=40_000)
    for seed in range(6):
        collect(engine, Request(a_prompt(20, seed), 1))
        assert 0 < engine.prefixes.n_bytes <= 40_000


def test_text_continues_a_context(model):
    document = prefill(model, [a_prompt(50)])
    start = Start(document, b"document")
    for prompt in ([], a_prompt(20, seed=4)[1:]):
        request = Request(prompt, 9, seed=5, start=start)
        engine = make_engine(model)
        (events,) = collect(engine, request)
        assert text_of(events) == solo(model, request)
        (again,) = collect(engine, request)
        assert again[-1].end.n_cached == len(prompt)
        other = Request(prompt, 9, seed=5, start=Start(document, b"other"))
        assert collect(engine, other)[0][-1].end.n_cached == 0
