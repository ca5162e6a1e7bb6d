"""The official client of the OpenAI API against `tvq serve`, as a process of its own."""

import signal
import threading
import time
from contextlib import contextmanager

import pytest
from openai import APIError, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from servers import a_run, serving, wait_until

from transformer_vq import generate_text, load_run

KEY = "secret"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a random model, whose texts hardly ever end."""
    return a_run(tmp_path_factory.mktemp("runs") / "small")


@contextmanager
def connected(run, store, *options):
    """Start a server; yield its process and a client."""
    with serving(run, store, *options, api_key=KEY) as server:
        url = f"{server.url}/v1"
        with OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
            yield server.process, client


@pytest.fixture(scope="module")
def client(run, tmp_path_factory):
    with connected(run, tmp_path_factory.mktemp("store")) as (_, client):
        yield client


def test_completion_equals_the_library(client, run):
    assert [model.id for model in client.models.list()] == ["small"]
    found = client.completions.create(
        model="small", prompt="It was", max_tokens=30, seed=3, temperature=0.9, top_p=0.8
    )
    model, tokenizer, _ = load_run(run)
    want = generate_text(model, tokenizer, "It was", 30, temperature=0.9, top_p=0.8, seed=3)
    assert found.choices[0].text == want
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 30)


def test_stream_and_batches(client):
    body = {"model": "small", "prompt": ["one", "two"], "n": 2, "max_tokens": 20, "seed": 1}
    want = [choice.text for choice in client.completions.create(**body).choices]
    texts = [""] * 4
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == want
    assert len(set(texts)) == 4


def test_errors(client):
    with pytest.raises(NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError, match="max_tokens"):
        client.completions.create(model="small", prompt="x", max_tokens=-1)
    message = {"role": "user", "content": "hello"}
    with pytest.raises(BadRequestError, match="chat template"):
        client.chat.completions.create(model="small", messages=[message])
    with pytest.raises(AuthenticationError, match="API key"):
        client.with_options(api_key="wrong").models.list()


def stream(client):
    """Start a text that lasts longer than the test; return its chunks."""
    body = {"model": "small", "prompt": "x", "max_tokens": 60_000}
    return client.completions.create(**body, stream=True)


def test_sigterm_ends_requests_within_the_deadline(run, tmp_path):
    with connected(run, tmp_path, "--stop-time", "1") as (process, client):
        chunks = iter(stream(client))
        next(chunks)
        start = time.monotonic()
        process.terminate()
        with pytest.raises(APIError, match="shutting down") as error:
            list(chunks)
        assert error.value.body["code"] == "shutting_down"
        assert process.wait(timeout=60) == -signal.SIGTERM
        assert time.monotonic() - start < 30


def test_server_killed_under_load_loses_no_stored_context(run, tmp_path):
    contexts, texts, errors = [], [], []

    def text_after(client, context):
        body = {"model": "small", "prompt": "", "max_tokens": 9, "seed": 2}
        extra = {"context": context["id"]}
        return client.completions.create(**body, extra_body=extra).choices[0].text

    def upload(client):
        while True:
            body = {"text": f"Document {len(contexts)}. " * 50}
            contexts.append(client.post("/contexts", cast_to=object, body=body))
            texts.append(text_after(client, contexts[-1]))

    def until_an_error(function, client):
        try:
            function(client)
        except Exception as error:  # of the client or of its HTTP library
            errors.append(error)

    with connected(run, tmp_path) as (process, client):
        functions = (lambda client: list(stream(client)),) * 2 + (upload,)
        threads = [threading.Thread(target=until_an_error, args=(f, client)) for f in functions]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(texts) >= 5, seconds=60)
        process.kill()  # while texts are generated and contexts are written
        for thread in threads:
            thread.join()
    assert len(errors) == 3
    with connected(run, tmp_path) as (_, client):
        listed = {x["id"]: x for x in client.get("/contexts", cast_to=object)["data"]}
        for created in contexts:
            assert listed[created["id"]] == created
        for created, want in zip(contexts, texts, strict=False):
            assert text_after(client, created) == want
