"""Engines, requests and their texts, for tests."""

import random

from transformer_vq import Sampling
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.text import sample_text
from transformer_vq.serve.engine import Engine
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Request

TOKENIZER = ByteTokenizer(end_of_document=True)
MEGABYTE = 2**20


def make_engine(model, n_slots=3, max_waiting=64, memory=MEGABYTE):
    store = PrefixStore(memory)
    return Engine(model, TOKENIZER, store, n_slots, max_waiting)


def a_prompt(n, seed=0):
    return [TOKENIZER.bos, *random.Random(seed).choices(range(256), k=n - 1)]


def solo(model, request):
    """The text that `tvq sample` generates."""
    start = None if request.start is None else request.start.context
    context = prefill(model, [request.prompt], start) if request.prompt else start
    (found,) = sample_text(
        model,
        TOKENIZER,
        context.repeat(1 + request.sample),
        request.max_new_tokens,
        request.sampling,
        seed=request.seed,
        stop=request.stop,
    )[-1:]
    return found.text


def collect(engine, *requests):
    """Run requests to their end on this thread; return the events of each."""
    events = [[] for _ in requests]
    for request, found in zip(requests, events, strict=True):
        engine.submit(request, found.append)
    while engine.run_once():
        pass
    return events


def text_of(events):
    """The whole text, which the events also give bit by bit."""
    end = events[-1].end
    assert "".join(event.text for event in events) == end.text
    return end.text


def many_requests():
    rules = [Sampling(), Sampling(temperature=0.0), Sampling(0.7, 0.9), Sampling(1.3, 1.0, 5)]
    return [
        Request(
            a_prompt(3 + 11 * i, seed=i),
            max_new_tokens=5 + 7 * (i % 4),
            sampling=rules[i % 4],
            seed=i,
            sample=i % 3,
        )
        for i in range(12)
    ]
