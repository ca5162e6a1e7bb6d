"""The engine: texts equal those of `sample_text`, whatever else is running."""

import queue
import threading
from dataclasses import replace

import pytest
import torch
from engines import a_prompt, collect, make_engine, many_requests, solo, text_of

from transformer_vq import ModelConfig, Sampling, TransformerVQ, UserError
from transformer_vq.generation import sampling as sampling_module
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.serve import engine as engine_module
from transformer_vq.serve.engine import EngineStoppedError
from transformer_vq.serve.requests import Request, Start

pytestmark = pytest.mark.usefixtures("short_segments")


@pytest.mark.parametrize("is_ahead", [False, True])  # True: the order of steps on a GPU
def test_texts_equal_those_of_the_library_while_others_come_and_go(model, monkeypatch, is_ahead):
    monkeypatch.setattr(engine_module, "runs_ahead", lambda logits: is_ahead)
    requests = many_requests()
    for request, events in zip(requests, collect(make_engine(model), *requests), strict=True):
        assert text_of(events) == solo(model, request)
        assert events[-1].end.n_prompt == len(request.prompt)


def test_the_end_of_the_document_ends_a_text(model):
    request = Request(a_prompt(9), 60, seed=5)
    (ended,) = collect(make_engine(model), request)
    assert ended[-1].end.reason == "stop"  # this seed draws the end of the document
    assert ended[-1].end.n_new < 60
    assert text_of(ended) == solo(model, request)


def test_a_long_prompt_delays_others_by_one_segment_at_a_time(model):
    engine = make_engine(model)
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


@pytest.mark.parametrize("when", ["waiting", "reading", "decoding"])
def test_cancelled_request_frees_its_slot(model, when):
    engine = make_engine(model, n_slots=1)
    first, events = [], []
    if when == "waiting":
        other = engine.submit(Request(a_prompt(5), 50), first.append)
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
    assert engine.counters.finished["cancelled"] == 1 + (when == "waiting")


def test_failure_ends_only_the_requests_it_affects(model):
    engine = make_engine(model)
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
    *found, failed = collect(make_engine(model), *good, bad)
    *want, _ = collect(make_engine(model), *good, Request(a_prompt(9), 12))
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
    engine = make_engine(model)
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


def test_stop_finishes_what_it_can_and_cancels_the_rest(model):
    engine = make_engine(model)
    engine.start()
    events = queue.SimpleQueue()
    engine.submit(Request(a_prompt(5), 3), events.put)
    engine.stop(seconds=30)
    while (end := events.get(timeout=5).end) is None:
        pass
    assert end.reason == "length"

    engine = make_engine(model)
    engine.start()
    engine.submit(Request(a_prompt(5), 10**7), events.put)
    engine.stop(seconds=0)
    while (end := events.get(timeout=5).end) is None:
        pass
    assert end.reason == "cancelled"


def test_full_attention_and_empty_prompts_are_refused(model):
    config = ModelConfig(vocab_size=257, d_model=8, n_layer=1, d_k=8, attention="full")
    full = TransformerVQ(config)
    with pytest.raises(UserError, match="full attention"):
        make_engine(full)
    with pytest.raises(UserError, match="no tokens"):
        make_engine(model).submit(Request([], 5), lambda event: None)
