"""The engine: texts equal those of `sample_text`, whatever else is running or was reused."""

import queue
import threading
from dataclasses import replace

import pytest
import torch
from servers import a_model, a_prompt, an_engine, collect, solo, text_of

from transformer_vq import Sampling, UserError
from transformer_vq.generation import sampling as sampling_module
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.serve import engine as engine_module
from transformer_vq.serve.engine import EngineStoppedError
from transformer_vq.serve.requests import Request, Start

pytestmark = pytest.mark.usefixtures("short_segments")


def many_requests():
    rules = [Sampling(), Sampling(temperature=0.0), Sampling(0.7, 0.9), Sampling(1.3, 1.0, 5)]
    return [
        Request(a_prompt(3 + 7 * i, seed=i), 3 + 5 * (i % 4), rules[i % 4], seed=i, sample=i % 3)
        for i in range(8)
    ]


@pytest.mark.parametrize("is_ahead", [False, True])  # True: the order of steps on a GPU
def test_texts_equal_those_of_the_library_while_others_come_and_go(model, monkeypatch, is_ahead):
    monkeypatch.setattr(engine_module, "runs_ahead", lambda logits: is_ahead)
    requests = many_requests()
    for request, events in zip(requests, collect(an_engine(model), *requests), strict=True):
        assert text_of(events) == solo(model, request)
        assert events[-1].end.n_prompt == len(request.prompt)


def test_the_end_of_the_document_ends_a_text(model):
    request = Request(a_prompt(9), 60, seed=5)
    (ended,) = collect(an_engine(model), request)
    assert ended[-1].end.reason == "stop"  # this seed draws the end of the document
    assert ended[-1].end.n_new < 60
    assert text_of(ended) == solo(model, request)


def test_a_long_prompt_delays_others_by_one_segment_at_a_time(model):
    engine = an_engine(model)
    long, short, decoding = [], [], []
    engine.submit(Request(a_prompt(10), 200), decoding.append)
    engine.run_once()
    engine.submit(Request(a_prompt(16 * 40), 1), long.append)
    engine.run_once()
    n_before = len(decoding)
    engine.submit(Request(a_prompt(12, seed=1), 3), short.append)
    for n_iterations in range(1, 6):
        engine.run_once()
        assert len(decoding) == n_before + n_iterations  # a token in every iteration
    assert short[-1].end
    assert not long


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
def test_cancelled_request_frees_its_slot(model, when):
    engine = an_engine(model, n_slots=1)
    events = []
    if when == "waiting":
        other = engine.submit(Request(a_prompt(5), 50), lambda event: None)
        engine.run_once()
    generation = engine.submit(Request(a_prompt(60), 50), events.append)
    for _ in range(9 if when == "decoding" else 2):
        engine.run_once()
    assert (len(events) > 1) == (when == "decoding")
    generation.cancel()
    engine.run_once()
    assert events[-1].end.reason == "cancelled"
    if when == "waiting":
        other.cancel()
        engine.run_once()
    assert (engine.n_active, engine.n_waiting) == (0, 0)
    assert engine.metrics.total("requests", reason="cancelled") == 1 + (when == "waiting")


def test_failure_ends_only_the_requests_it_affects(model):
    engine = an_engine(model)
    good, bad = [], []
    engine.submit(Request(a_prompt(5), 8), good.append)
    engine.run_once()
    engine.submit(Request([1, 2, 3000], 8), bad.append)  # a token that the model does not have
    while engine.run_once():
        pass
    assert bad[-1].end.reason == "error"
    assert bad[-1].end.error == "internal error"
    assert good[-1].end.reason == "length"


def assert_ends_alone(model, bad, error):
    """Check that a request fails, and that the others get the same tokens and scores to the bit."""
    good = [Request(a_prompt(5, seed=i), 12, seed=i, n_logprobs=2) for i in range(2)]
    *found, failed = collect(an_engine(model), *good, bad)
    *want, _ = collect(an_engine(model), *good, Request(a_prompt(9), 12))
    assert (failed[-1].end.reason, failed[-1].end.error) == ("error", error)
    assert found == want
    return failed


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_text_without_finite_logits_ends_alone(model, monkeypatch, is_ahead, value):
    monkeypatch.setattr(engine_module, "runs_ahead", lambda logits: is_ahead)
    context = prefill(model, [a_prompt(5)])
    bad_logits = Context(torch.full_like(context.logits, value), context.state)
    layers = [replace(x, v=torch.full_like(x.v, value)) for x in context.state.layers]
    bad_state = Context(context.logits, replace(context.state, layers=tuple(layers)))
    for start, n_new in ((bad_logits, 0), (bad_state, 1)):
        request = Request([], 12, start=Start(start, b"bad"))
        failed = assert_ends_alone(model, request, "the logits are NaN or infinite")
        assert failed[-1].end.n_new == n_new


def test_choice_that_fails_ends_its_text_alone(model, monkeypatch):
    bad = Sampling(top_k=3)

    def choose(rules, logits, uniform):
        if bad in rules:
            raise RuntimeError("this rule always fails")
        return sampling_module.choose(rules, logits, uniform)

    monkeypatch.setattr(engine_module, "choose", choose)
    assert_ends_alone(model, Request(a_prompt(7), 12, bad), "internal error")


def test_thread_serves_many_clients(model):
    engine = an_engine(model)
    engine.start()
    requests = many_requests()
    found = {}

    def client(i):
        found[i] = engine.generate(requests[i]).text

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.stop()
    assert found == {i: solo(model, request) for i, request in enumerate(requests)}
    with pytest.raises(EngineStoppedError):
        engine.submit(requests[0], lambda event: None)


@pytest.mark.parametrize(
    ("n_tokens", "seconds", "reason"), [(3, 30, "length"), (10**7, 0, "cancelled")]
)
def test_stop_finishes_what_it_can_and_cancels_the_rest(model, n_tokens, seconds, reason):
    engine, events = an_engine(model), queue.SimpleQueue()
    engine.start()
    engine.submit(Request(a_prompt(5), n_tokens), events.put)
    engine.stop(seconds)
    while (end := events.get(timeout=5).end) is None:
        pass
    assert end.reason == reason


def test_full_attention_and_empty_prompts_are_refused(model):
    with pytest.raises(UserError, match="full attention"):
        an_engine(a_model(attention="full"))
    with pytest.raises(UserError, match="no tokens"):
        an_engine(model).submit(Request([], 5), lambda event: None)


# Prefixes


@pytest.mark.parametrize(("n_shared", "n_cached"), [(70, 64), (64, 64), (63, 32), (17, 16), (9, 0)])
def test_prompts_with_the_same_beginning_share_it_and_no_bit_changes(model, n_shared, n_cached):
    engine = an_engine(model)
    collect(engine, Request(a_prompt(75), 1))
    prompt = [*a_prompt(75)[:n_shared], *a_prompt(30, seed=9)]
    (events,) = collect(engine, Request(prompt, 0))
    got, want = events[-1].end.context, prefill(model, [prompt])
    assert events[-1].end.n_cached == n_cached
    assert torch.equal(got.logits, want.logits)
    for name, x in want.state.to_tensors().items():
        assert torch.equal(got.state.to_tensors()[name], x), name


def test_memory_limit_of_prefixes_is_kept(model):
    engine = an_engine(model, memory=40_000)
    for seed in range(6):
        collect(engine, Request(a_prompt(20, seed), 1))
        assert 0 < engine.prefixes.n_bytes <= 40_000


def test_text_continues_a_context(model):
    document = prefill(model, [a_prompt(50)])
    start = Start(document, b"document")
    for prompt in ([], a_prompt(20, seed=4)[1:]):
        request = Request(prompt, 9, seed=5, start=start)
        engine = an_engine(model)
        (events,) = collect(engine, request)
        assert text_of(events) == solo(model, request)
        (again,) = collect(engine, request)
        assert again[-1].end.n_cached == len(prompt)
        other = Request(prompt, 9, seed=5, start=Start(document, b"other"))
        assert collect(engine, other)[0][-1].end.n_cached == 0
