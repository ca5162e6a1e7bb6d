"""The official client of the OpenAI API against `tvq serve`, as a process of its own."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from openai import APIError, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from servers import a_run, wait_until

from transformer_vq import generate_text, load_run

KEY = "secret"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a random model, whose texts hardly ever end."""
    return a_run(tmp_path_factory.mktemp("runs") / "small")


class Served:
    """A server process."""

    def __init__(self, run: Path, store: Path, *options: str) -> None:
        command = [sys.executable, "-m", "transformer_vq", "serve", str(run), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--store", str(store), *options],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TVQ_API_KEY": KEY},
        )
        assert self.process.stdout is not None
        self.port = int(re.search(r":(\d+)/", self.process.stdout.readline()).group(1))
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=60
        )

    def active(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/health")
        found = connection.getresponse().read()
        connection.close()
        return int(re.search(rb'"active":(\d+)', found).group(1))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit status."""
        self.client.close()
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    server = Served(run, tmp_path_factory.mktemp("store"))
    yield server
    server.stop()


def test_completion_equals_the_library(served, run):
    assert [model.id for model in served.client.models.list()] == ["small"]
    found = served.client.completions.create(
        model="small", prompt="It was", max_tokens=30, seed=3, temperature=0.9, top_p=0.8
    )
    model, tokenizer, _ = load_run(run)
    want = generate_text(model, tokenizer, "It was", 30, temperature=0.9, top_p=0.8, seed=3)
    assert found.choices[0].text == want
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 30)


def test_stream_and_batches(served):
    body = {"model": "small", "prompt": ["one", "two"], "n": 2, "max_tokens": 20, "seed": 1}
    want = [choice.text for choice in served.client.completions.create(**body).choices]
    texts = [""] * 4
    for chunk in served.client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == want
    assert len(set(texts)) == 4


def test_log_probabilities(served):
    found = served.client.completions.create(
        model="small", prompt="abc", max_tokens=4, logprobs=3, echo=True, seed=0
    )
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 1 + 3 + 4
    assert all(x <= 0 for x in logprobs.token_logprobs[1:])


def test_extra_fields_and_contexts(served):
    created = served.client.post("/contexts", cast_to=object, body={"text": "A document."})
    body = {"model": "small", "prompt": " More", "max_tokens": 9, "seed": 2}
    found = served.client.completions.create(
        **body, extra_body={"context": created["id"], "top_k": 1}
    )
    want = served.client.completions.create(
        **body | {"prompt": "A document. More"}, extra_body={"top_k": 1}
    )
    assert found.choices[0].text == want.choices[0].text
    assert found.usage.prompt_tokens_details.cached_tokens >= 12


def test_errors(served):
    with pytest.raises(NotFoundError, match="does not exist"):
        served.client.completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError, match="max_tokens"):
        served.client.completions.create(model="small", prompt="x", max_tokens=-1)
    message = {"role": "user", "content": "hello"}
    with pytest.raises(BadRequestError, match="chat template"):
        served.client.chat.completions.create(model="small", messages=[message])
    with pytest.raises(AuthenticationError, match="API key"):
        served.client.with_options(api_key="wrong").models.list()


def test_cancelled_stream_frees_its_slot(served):
    stream = served.client.completions.create(
        model="small", prompt="x", max_tokens=60_000, stream=True
    )
    next(iter(stream))
    assert served.active() == 1
    stream.close()
    wait_until(lambda: not served.active())


def test_sigterm_ends_requests_within_the_deadline(run, tmp_path):
    server = Served(run, tmp_path, "--stop-time", "1")
    stream = server.client.completions.create(
        model="small", prompt="x", max_tokens=60_000, stream=True
    )
    chunks = iter(stream)
    next(chunks)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(APIError, match="shutting down") as error:
        list(chunks)
    assert error.value.body["code"] == "shutting_down"
    assert server.stop() == -signal.SIGTERM
    assert time.monotonic() - start < 30


def test_server_killed_under_load_loses_no_stored_context(run, tmp_path):
    server = Served(run, tmp_path)
    body = {"model": "small", "prompt": "", "max_tokens": 9, "seed": 2}
    contexts, texts, errors = [], [], []

    def generate():
        try:
            for _ in server.client.completions.create(
                model="small", prompt="x", max_tokens=60_000, stream=True
            ):
                pass
        except Exception as error:  # of the client or of its HTTP library
            errors.append(error)

    def upload():
        try:
            while True:
                text = f"Document {len(contexts)}. " * 50
                contexts.append(
                    server.client.post("/contexts", cast_to=object, body={"text": text})
                )
                extra = {"context": contexts[-1]["id"]}
                found = server.client.completions.create(**body, extra_body=extra)
                texts.append(found.choices[0].text)
        except Exception as error:  # of the client or of its HTTP library
            errors.append(error)

    threads = [threading.Thread(target=x, daemon=True) for x in (generate, generate, upload)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(texts) >= 5, seconds=60)
    server.process.kill()  # while texts are generated and contexts are written
    for thread in threads:
        thread.join()
    server.stop(signal.SIGKILL)
    assert len(errors) == 3
    server = Served(run, tmp_path)
    listed = {x["id"]: x for x in server.client.get("/contexts", cast_to=object)["data"]}
    for created in contexts:
        assert listed[created["id"]] == created
    for created, want in zip(contexts, texts, strict=False):
        extra = {"context": created["id"]}
        got = server.client.completions.create(**body, extra_body=extra).choices[0].text
        assert got == want
    server.stop()
